package tokenize

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
)

// batchBytes is how much text goes to the encoder at a time: enough that handing it over costs nothing to speak of, little
// enough that others wait a few milliseconds at most. A chunk that is longer goes alone.
const batchBytes = 32 << 10

// chunker encodes texts chunk by chunk and keeps what it encoded. It is safe for concurrent use.
type chunker struct {
	pool    *pool
	rules   *cutRules
	cache   *chunkCache
	metrics *metrics
	scratch sync.Pool // of *chunkScratch
}

// chunkScratch is what one encoding needs besides its result.
type chunkScratch struct {
	pieces []piece
	batch  []int
}

// piece is one chunk of a text: its entry, or nil until it is encoded.
type piece struct {
	entry      *cacheEntry
	hash       uint64
	start, end int
	ahead      int
}

func newChunker(p *pool, rules *cutRules, cacheBytes int64, m *metrics) *chunker {
	c := &chunker{pool: p, rules: rules, cache: newChunkCache(cacheBytes, m.chunkCache), metrics: m}
	c.scratch.New = func() any { return new(chunkScratch) }
	return c
}

// encode appends before, the ids of text, and after, to dst, which grows at most once. It returns ctx's error soon after ctx
// ends; what was encoded until then stays in the cache.
func (c *chunker) encode(ctx context.Context, dst []uint32, text string, before, after []uint32) ([]uint32, error) {
	if len(text) <= maxChunk { // one chunk: nothing to note down
		if e := c.cache.get(c.cache.key(text, 0), text, 0); e != nil {
			c.metrics.cachedBytes.Add(float64(len(text)))
			dst = append(slices.Grow(dst, len(before)+len(e.ids)+len(after)), before...)
			return append(append(dst, e.ids...), after...), nil
		}
	}
	scratch, _ := c.scratch.Get().(*chunkScratch)
	defer c.release(scratch)
	pieces := scratch.pieces[:0]
	total, missing := len(before)+len(after), 0
	for start := 0; start < len(text); {
		end, ahead := c.rules.next(text, start)
		key := text[start : end+ahead]
		p := piece{hash: c.cache.key(key, ahead), start: start, end: end, ahead: ahead}
		if p.entry = c.cache.get(p.hash, key, ahead); p.entry != nil {
			total += len(p.entry.ids)
		} else {
			missing += end - start
		}
		pieces = append(pieces, p)
		start = end
	}
	scratch.pieces = pieces
	c.metrics.cachedBytes.Add(float64(len(text) - missing))
	if missing > 0 {
		c.metrics.encodedBytes.Add(float64(missing))
		n, err := c.fill(ctx, text, scratch)
		if errors.Is(err, errCutDiffers) {
			// The proof at load did not see this coming. The whole text is still right.
			c.metrics.mismatches.Inc()
			return c.encodeWhole(ctx, dst, text, false, before, after)
		}
		if err != nil {
			return dst, err
		}
		total += n
	}
	dst = append(slices.Grow(dst, total), before...)
	for i := range pieces {
		dst = append(dst, pieces[i].entry.ids...)
	}
	return append(dst, after...), nil
}

// release gives the scratch back without the entries it points to.
func (c *chunker) release(s *chunkScratch) {
	clear(s.pieces)
	const keep = 4096
	if cap(s.pieces) <= keep {
		c.scratch.Put(s)
	}
}

// fill encodes the missing pieces, batch by batch, and returns the number of their ids.
func (c *chunker) fill(ctx context.Context, text string, s *chunkScratch) (ids int, err error) {
	for next := 0; next < len(s.pieces); {
		s.batch = s.batch[:0]
		bytes, first := 0, 0
		for ; next < len(s.pieces); next++ {
			p := &s.pieces[next]
			if p.entry != nil {
				continue
			}
			// Neither more text than a batch has, nor a few chunks far apart: the encoder gets all that lies between.
			if bytes > 0 && (bytes+p.end-p.start > batchBytes || p.end-first > 4*batchBytes) {
				break
			}
			// The same chunk may stand in an earlier batch, or another request may have brought it meanwhile.
			if p.entry = c.cache.get(p.hash, text[p.start:p.end+p.ahead], p.ahead); p.entry != nil {
				ids += len(p.entry.ids)
				continue
			}
			if bytes == 0 {
				first = p.start
			}
			bytes += p.end - p.start
			s.batch = append(s.batch, next)
		}
		if len(s.batch) == 0 {
			continue
		}
		n, err := c.encodeBatch(ctx, text, s)
		if err != nil {
			return ids, err
		}
		ids += n
	}
	return ids, nil
}

// encodeBatch encodes the pieces of s.batch on one of the pool's threads, which also puts them into the cache, whether or not
// this call is still waiting for them.
func (c *chunker) encodeBatch(ctx context.Context, text string, s *chunkScratch) (ids int, err error) {
	// The thread may outlast this call: it gets memory of its own.
	first := s.pieces[s.batch[0]].start
	last := s.pieces[s.batch[len(s.batch)-1]]
	window := text[first : last.end+last.ahead]
	pieces := make([]piece, len(s.batch))
	spans := make([]span, 0, 2*len(s.batch))
	for i, at := range s.batch {
		p := s.pieces[at]
		p.start, p.end = p.start-first, p.end-first
		pieces[i] = p
		end := uintptr(p.end)
		spans = append(spans, span{uintptr(p.start), end + uintptr(p.ahead)}, span{end, end + uintptr(p.ahead)})
	}
	store := func(ids []uint32, counts []uintptr) error {
		for i := range pieces {
			p := &pieces[i]
			with, ahead := int(counts[2*i]), int(counts[2*i+1])
			part, err := chunkIDs(ids, with, ahead)
			if err != nil {
				return err
			}
			ids = ids[with+ahead:]
			p.entry = &cacheEntry{
				// Copies: neither a request's text nor the thread's buffer may be kept alive by a chunk.
				text:  strings.Clone(window[p.start : p.end+p.ahead]),
				ids:   append(make([]uint32, 0, len(part)), part...),
				hash:  p.hash,
				ahead: p.ahead,
			}
			c.cache.put(p.entry)
		}
		return nil
	}
	if err := c.pool.run(ctx, window, spans, false, store); err != nil {
		return 0, err
	}
	for i, at := range s.batch {
		s.pieces[at].entry = pieces[i].entry
		ids += len(pieces[i].entry.ids)
	}
	return ids, nil
}

// encodeWhole is encode in one piece and without the cache. addSpecial asks the tokenizer itself for its special tokens.
func (c *chunker) encodeWhole(ctx context.Context, dst []uint32, text string, addSpecial bool, before, after []uint32) ([]uint32, error) {
	var all []uint32
	store := func(ids []uint32, _ []uintptr) error {
		all = slices.Clone(ids) // not into dst: this call may be over
		return nil
	}
	if err := c.pool.run(ctx, text, []span{{0, uintptr(len(text))}}, addSpecial, store); err != nil {
		return dst, err
	}
	return append(append(append(dst, before...), all...), after...), nil
}

// close gives the cache's memory back. No encode may run any more.
func (c *chunker) close() {
	c.cache.close()
}
