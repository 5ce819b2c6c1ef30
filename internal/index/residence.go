package index

import (
	"math"
	"time"
)

// Residence returns how long a replica is expected to keep a block that nobody touches: a cache of numBlocks blocks that
// takes in newBlockRate new ones a second has replaced its least recently used after numBlocks/newBlockRate seconds. It is
// what Holder.MaxAge wants. It returns 0, for "no limit but the TTL", while either is unknown or nothing new comes in.
//
// Both numbers come from the engine itself (cache_config_info and its token counters), so all gateways compute the same
// however the traffic is spread over them, and a cache that is enlarged (or shrunk) keeps its blocks for longer (or less
// long) from the next scrape on: ages are kept, not deadlines.
func Residence(numBlocks int, newBlockRate float64) time.Duration {
	if numBlocks <= 1 || !(newBlockRate > 0) || math.IsInf(newBlockRate, 1) {
		return 0
	}
	// One block of the engine's pool is never usable (observed of vLLM 0.32).
	d := float64(numBlocks-1) / newBlockRate * float64(time.Second)
	if d >= math.MaxInt64 {
		return 0
	}
	return max(time.Duration(d), 1)
}
