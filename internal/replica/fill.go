package replica

import (
	"math"
	"slices"
	"time"
)

// FilledBlocks returns how many blocks an engine has filled since its start, out of its counters of prompt, cached and generated
// tokens; NaN if one of them is. An untouched block moves towards eviction with each block that is newly filled, and with each
// cached one that is used again if it lay ahead, as half of them do on average.
func FilledBlocks(prompt, cached, generated float64, blockTokens int) float64 {
	return (prompt - cached/2 + generated) / float64(blockTokens)
}

// fillSteps is how many readings a cache's worth of blocks is divided into.
const fillSteps = 128

// FillRate finds how fast an engine's cache is refilled: over the time in which it was last filled once, so that bursts and
// pauses count as far as they reach back into what the cache still holds. The zero value is ready for the counters of one life of an
// engine. It is not safe for concurrent use.
type FillRate struct {
	// points are readings, oldest first, about a step apart: the first lies a cache's worth behind the last, once there has
	// been one.
	points []fillPoint
	rate   float64
}

type fillPoint struct {
	at     time.Time
	blocks float64
}

// Observe takes in how many blocks the engine has filled since its start, and the size of its cache in blocks. A count that
// falls, or is not known, begins anew.
func (f *FillRate) Observe(now time.Time, filled, size float64) {
	f.rate = 0
	if math.IsNaN(filled) || size <= 0 || len(f.points) > 0 && filled < f.points[len(f.points)-1].blocks {
		f.points = f.points[:0]
		return
	}
	behind := 0 // The latest point that lies a whole cache behind.
	for behind+1 < len(f.points) && f.points[behind+1].blocks <= filled-size {
		behind++
	}
	f.points = slices.Delete(f.points, 0, behind)
	if n := len(f.points); n == 0 || filled-f.points[n-1].blocks >= size/fillSteps {
		f.points = append(f.points, fillPoint{now, filled})
	}
	if filled < size {
		return // It has never been full: nothing has been evicted.
	}
	// Until a cache's worth has been seen, what was seen must do.
	if first := f.points[0]; now.After(first.at) {
		f.rate = (filled - first.blocks) / now.Sub(first.at).Seconds()
	}
}

// PerSecond returns blocks per second; 0 while nothing is being evicted, or unknown.
func (f *FillRate) PerSecond() float64 { return f.rate }
