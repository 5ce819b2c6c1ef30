package sim

import (
	"slices"

	"prefixgate/internal/block"
)

// BlockID is a physical block's place in the pool.
type BlockID int32

const none BlockID = -1

// physical is one block of KV cache memory.
type physical struct {
	hash block.Hash // valid if stored
	// next and prev link the free queue, oldest first; valid while refs is 0.
	next, prev BlockID
	// twin is the next block stored under the same hash, in order of storing.
	twin   BlockID
	refs   int32
	stored bool
}

// Cache is an engine's pool of KV cache blocks with prefix caching, to the rules of vLLM's block pool:
//
//   - A block is in use while at least one running request refers to it. Blocks in no use wait in a queue, those freed longest ago
//     first; they keep what they hold until they are taken from its head for something new.
//   - A request's blocks are freed last one first, so that the end of a prompt goes before its beginning.
//   - The same content can lie in several blocks: a prompt that is cached up to its very end computes its last block anew, into
//     another block. Removing one copy leaves the other to be found.
//   - One block of the pool is never handed out.
//
// Blocks are named by block.Hash, so what must not be shared (models, adapters, salts) has to differ in the chain's root.
// A Cache is not safe for concurrent use. No method but NewCache allocates, apart from the growth of maps and of slices
// given to it.
type Cache struct {
	blocks []physical
	// byHash holds the first of the blocks stored under a hash.
	byHash     map[block.Hash]BlockID
	head, tail BlockID
	free       int
	evictions  int64
}

// NewCache returns an empty cache of numBlocks blocks, of which numBlocks-1 can be used. Fewer than 2 blocks are taken as 2.
func NewCache(numBlocks int) *Cache {
	numBlocks = max(numBlocks, 2)
	c := &Cache{
		blocks: make([]physical, numBlocks),
		byHash: make(map[block.Hash]BlockID),
		head:   none,
		tail:   none,
	}
	// Block 0 is the one that is never handed out; the engine pads its tables with it.
	c.blocks[0].refs = 1
	c.blocks[0].twin = none
	for i := 1; i < numBlocks; i++ {
		c.blocks[i].twin = none
		c.pushFree(BlockID(i))
	}
	return c
}

// Usable returns how many blocks can be in use at once.
func (c *Cache) Usable() int { return len(c.blocks) - 1 }

// Free returns how many blocks are in no use, whatever they still hold.
func (c *Cache) Free() int { return c.free }

// Used returns how many blocks are in use.
func (c *Cache) Used() int { return c.Usable() - c.free }

// Usage returns the part of the usable blocks that is in use, 0 to 1. A full but idle cache is at 0.
func (c *Cache) Usage() float64 { return float64(c.Used()) / float64(c.Usable()) }

// Stored returns how many different hashes the cache holds.
func (c *Cache) Stored() int { return len(c.byHash) }

// Evictions returns how many blocks lost what they held to something new.
func (c *Cache) Evictions() int64 { return c.evictions }

// Match returns how many leading blocks of chain are stored. It changes nothing, not even the order of eviction.
func (c *Cache) Match(chain []block.Hash) int {
	for i, h := range chain {
		if _, ok := c.byHash[h]; !ok {
			return i
		}
	}
	return len(chain)
}

// Acquire takes total blocks into use for one request: as many leading blocks of reusable as are stored, and new ones for the
// rest. It appends them to dst in the order of the prompt and returns the extended slice and the number of reused blocks. If the pool
// does not have the blocks, ok is false and nothing has changed.
func (c *Cache) Acquire(dst []BlockID, reusable []block.Hash, total int) (blocks []BlockID, hits int, ok bool) {
	start := len(dst)
	idle := 0
	for _, h := range reusable[:min(len(reusable), total)] {
		id, found := c.byHash[h]
		if !found {
			break
		}
		if c.blocks[id].refs == 0 {
			idle++
		}
		dst = append(dst, id)
	}
	hits = len(dst) - start
	// Reused blocks that nobody uses count as free until now, but will no longer be there for the new ones.
	if total-hits > c.free-idle {
		return dst[:start], 0, false
	}
	for _, id := range dst[start:] {
		b := &c.blocks[id]
		if b.refs == 0 {
			c.unlinkFree(id)
		}
		b.refs++
	}
	for range total - hits {
		dst = append(dst, c.take())
	}
	return dst, hits, true
}

// Grow takes one new block into use. If the pool has none, ok is false.
func (c *Cache) Grow() (id BlockID, ok bool) {
	if c.free == 0 {
		return none, false
	}
	return c.take(), true
}

// Store records that a block in use now holds, in full, the content named by h. A block that already holds something is left as it
// is: content never changes while it is in use.
func (c *Cache) Store(id BlockID, h block.Hash) {
	b := &c.blocks[id]
	if b.refs == 0 {
		panic("BUG: storing into a block that is in no use")
	}
	if b.stored {
		return
	}
	b.hash, b.stored, b.twin = h, true, none
	first, ok := c.byHash[h]
	if !ok {
		c.byHash[h] = id
		return
	}
	for c.blocks[first].twin != none {
		first = c.blocks[first].twin
	}
	c.blocks[first].twin = id
}

// Release ends one request's use of its blocks, given in the order of the prompt. What they hold stays to be found.
func (c *Cache) Release(blocks []BlockID) {
	for _, id := range slices.Backward(blocks) {
		b := &c.blocks[id]
		if b.refs == 0 {
			panic("BUG: a block was released twice")
		}
		b.refs--
		if b.refs == 0 {
			c.pushFree(id)
		}
	}
}

// Reset forgets everything stored. As in the engine it is refused, with false, while any block is in use.
func (c *Cache) Reset() bool {
	if c.Used() > 0 {
		return false
	}
	clear(c.byHash)
	for i := range c.blocks {
		c.blocks[i].stored = false
		c.blocks[i].twin = none
	}
	return true
}

// take hands out the block that has been in no use for longest; the caller knows that there is one.
func (c *Cache) take() BlockID {
	id := c.head
	c.unlinkFree(id)
	b := &c.blocks[id]
	if b.stored {
		c.forget(id)
		c.evictions++
	}
	b.refs = 1
	return id
}

// forget takes one block out of the blocks stored under its hash.
func (c *Cache) forget(id BlockID) {
	b := &c.blocks[id]
	first := c.byHash[b.hash]
	switch {
	case first != id:
		for c.blocks[first].twin != id {
			first = c.blocks[first].twin
		}
		c.blocks[first].twin = b.twin
	case b.twin != none:
		c.byHash[b.hash] = b.twin
	default:
		delete(c.byHash, b.hash)
	}
	b.stored, b.twin = false, none
}

func (c *Cache) pushFree(id BlockID) {
	b := &c.blocks[id]
	b.prev, b.next = c.tail, none
	if c.tail == none {
		c.head = id
	} else {
		c.blocks[c.tail].next = id
	}
	c.tail = id
	c.free++
}

func (c *Cache) unlinkFree(id BlockID) {
	b := &c.blocks[id]
	if b.prev == none {
		c.head = b.next
	} else {
		c.blocks[b.prev].next = b.next
	}
	if b.next == none {
		c.tail = b.prev
	} else {
		c.blocks[b.next].prev = b.prev
	}
	c.free--
}
