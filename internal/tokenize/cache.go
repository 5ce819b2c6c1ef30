package tokenize

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/prometheus/client_golang/prometheus"
)

// chunkCache keeps the ids of chunks, within a bound of bytes. It is safe for concurrent use.
//
// It is found by a 64-bit hash with a seed of this process and then by the text itself, which every entry keeps: two chunks
// whose hashes are equal, by chance or by someone's design, are two chunks. That costs one more byte for each byte of text,
// and makes exactness a matter of comparing, not of probability.
//
// Each shard is a clock: an entry that was asked for since the hand last passed is passed over once more. A flood of texts
// that are asked for once therefore pushes out one another and not what is in use.
type chunkCache struct {
	seed    maphash.Seed
	shards  []cacheShard
	max     int64
	metrics cacheMetrics
}

// cacheMetrics are what a cache reports. Gauges move by differences: several caches may share them.
type cacheMetrics struct {
	bytes, limit, entries prometheus.Gauge
	evicted               prometheus.Counter
}

// cacheEntry is one chunk. Text, ids, hash and ahead are read-only once it is in the cache.
type cacheEntry struct {
	// text is the chunk with its look-ahead.
	text string
	ids  []uint32
	hash uint64
	// ahead is the number of bytes of the look-ahead.
	ahead int
	// slot is the entry's place in its shard's ring, guarded by the shard's mu.
	slot int
	used atomic.Bool
}

type cacheShard struct {
	// mu guards what follows.
	mu      sync.Mutex
	entries map[uint64]*cacheEntry
	ring    []*cacheEntry
	hand    int
	bytes   int64
	max     int64

	_ [64]byte // keeps neighbors' locks out of this cache line
}

const cacheShards = 64

// entryOverhead is what an entry costs besides its text and ids: the struct, its places in the map and the ring.
const entryOverhead = int64(unsafe.Sizeof(cacheEntry{})) + 64

// heapFactor is what a byte on the heap costs the process: by default Go's collector lets the heap grow to twice what it
// found in use.
const heapFactor = 2

// cost is what the entry costs the process in memory. The allocator rounds sizes up, by at most an eighth.
func (e *cacheEntry) cost() int64 {
	data := int64(len(e.text)) + 4*int64(cap(e.ids))
	return heapFactor * (data + data/8 + entryOverhead)
}

// newChunkCache makes a cache of at most maxBytes; one of none if maxBytes is not positive.
func newChunkCache(maxBytes int64, m cacheMetrics) *chunkCache {
	c := &chunkCache{seed: maphash.MakeSeed(), max: max(maxBytes, 0), metrics: m}
	m.limit.Add(float64(c.max))
	if c.max == 0 {
		return c
	}
	// Few bytes make few shards, so that each can hold large chunks.
	n := cacheShards
	for n > 1 && maxBytes/int64(n) < 256<<10 {
		n /= 2
	}
	c.shards = make([]cacheShard, n)
	for i := range c.shards {
		c.shards[i].entries = map[uint64]*cacheEntry{}
		c.shards[i].max = maxBytes / int64(n)
	}
	return c
}

// key returns the hash of a chunk with a look-ahead of ahead bytes.
func (c *chunkCache) key(text string, ahead int) uint64 {
	return maphash.String(c.seed, text) + uint64(ahead)*0x9e3779b97f4a7c15
}

func (c *chunkCache) shard(hash uint64) *cacheShard {
	return &c.shards[hash>>32&uint64(len(c.shards)-1)]
}

// get returns the entry of a chunk, or nil.
func (c *chunkCache) get(hash uint64, text string, ahead int) *cacheEntry {
	if len(c.shards) == 0 {
		return nil
	}
	s := c.shard(hash)
	s.mu.Lock()
	e := s.entries[hash]
	s.mu.Unlock()
	if e == nil || e.ahead != ahead || e.text != text {
		return nil
	}
	if !e.used.Load() { // a write only where it changes something keeps the line shared
		e.used.Store(true)
	}
	return e
}

// put adds an entry, in place of another one of the same hash, and drops others to stay within the bound.
func (c *chunkCache) put(e *cacheEntry) {
	if len(c.shards) == 0 {
		return
	}
	s := c.shard(e.hash)
	cost := e.cost()
	if cost > s.max {
		return
	}
	var count, bytes int64
	s.mu.Lock()
	if old := s.entries[e.hash]; old != nil {
		// The same chunk, encoded twice at once, or another of the same hash. Either way the new one takes the place.
		e.slot = old.slot
		s.ring[e.slot] = e
		bytes -= old.cost()
		count--
	} else {
		e.slot = len(s.ring)
		s.ring = append(s.ring, e)
	}
	s.entries[e.hash] = e
	bytes += cost
	count++
	s.bytes += bytes
	dropped := 0
	for s.bytes > s.max {
		if s.hand >= len(s.ring) {
			s.hand = 0
		}
		victim := s.ring[s.hand]
		if victim == e || victim.used.Swap(false) {
			s.hand++
			continue
		}
		delete(s.entries, victim.hash)
		last := len(s.ring) - 1
		s.ring[s.hand] = s.ring[last]
		s.ring[s.hand].slot = s.hand
		s.ring[last] = nil
		s.ring = s.ring[:last]
		s.bytes -= victim.cost()
		bytes -= victim.cost()
		count--
		dropped++
	}
	s.mu.Unlock()
	c.metrics.bytes.Add(float64(bytes))
	c.metrics.entries.Add(float64(count))
	if dropped > 0 {
		c.metrics.evicted.Add(float64(dropped))
	}
}

// close empties the cache and takes it out of the gauges.
func (c *chunkCache) close() {
	c.metrics.limit.Sub(float64(c.max))
	for i := range c.shards {
		s := &c.shards[i]
		s.mu.Lock()
		c.metrics.bytes.Sub(float64(s.bytes))
		c.metrics.entries.Sub(float64(len(s.ring)))
		s.entries = map[uint64]*cacheEntry{}
		s.ring, s.hand, s.bytes = nil, 0, 0
		s.mu.Unlock()
	}
}
