package index

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"sync"

	"prefixgate/internal/block"
	"prefixgate/internal/replica"

	"github.com/cespare/xxhash/v2"
)

const (
	// firstSegment is the length in blocks of the segments up to denseUntil. 32 blocks are 512 tokens at vLLM's default
	// block size: short enough that a run's path is 128 bytes, long enough that a run's overhead is spread.
	firstSegment = 32
	// denseUntil is the first position from which segments grow.
	denseUntil = 256
	// longestSegment keeps a run's length within 16 bits.
	longestSegment = 1 << 14
	// maxSteps bounds the claims one holder has on one run. Several are needed where chains leave a run at different
	// depths and the deeper ones were touched longer ago. Random ages give about ln(forks) of them.
	maxSteps = 12
	// maxNested bounds the forks of forks that a head remembers; the most recently touched are kept.
	maxNested = 32
)

// segmentEnd returns where the segment that starts at a head ends: the position of the next head. Segments of a quarter to a
// half of their position keep the number of heads below 2 log2 n: 8 for 256 blocks, 12 for 1,024, 18 for 6,250.
func segmentEnd(head int) int {
	if head < denseUntil {
		return head + firstSegment
	}
	return head + min(1<<(bits.Len(uint(head))-2), longestSegment)
}

// appendHeads appends the positions of all heads below n.
func appendHeads(dst []int, n int) []int {
	for p := 0; p < n; p = segmentEnd(p) {
		dst = append(dst, p)
	}
	return dst
}

// holderKey names a replica's life in claims. It is the same on every gateway; a collision of two replicas' keys (one
// in 2^64) would credit one with the other's blocks.
func holderKey(id replica.ID) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], xxhash.Sum64String(id.Addr))
	binary.LittleEndian.PutUint64(b[8:], uint64(id.Start))
	return xxhash.Sum64(b[:])
}

// fingerprint is what a run keeps of a block after its first. Two prompts that part within a run are taken for one only if
// the first differing block's fingerprints agree, one case in 2^32.
func fingerprint(h block.Hash) uint32 { return uint32(h) }

// claim says that a holder has the first blocks of a run.
type claim struct {
	holder uint64
	at     int64 // when they were last touched, Unix milliseconds
	blocks uint16
	check  uint16 // of the fingerprint of the last of them: a claim on a path that was since replaced does not count
}

// run is a stretch of one path, starting at a block that names it.
type run struct {
	path   string   // fingerprints of the blocks after the first, 4 bytes each, little endian; as it comes from Redis
	claims []claim  // of one holder: blocks falling, at rising
	nested []uint16 // heads only: offsets at which a run that is not the head's own was left, oldest touch first
}

// blocks returns the length of the run's path.
func (r *run) blocks() int { return 1 + len(r.path)/4 }

func (r *run) checkOf(blocks int) uint16 {
	if blocks < 2 {
		return 0
	}
	i := 4 * (blocks - 2)
	return uint16(r.path[i]) | uint16(r.path[i+1])<<8
}

func (r *run) valid(c claim) bool {
	n := int(c.blocks)
	return n >= 1 && n <= r.blocks() && c.check == r.checkOf(n)
}

// follow returns how many blocks of chain, from base up to end, lie on the run's path. The first does: it names the run.
func (r *run) follow(chain []block.Hash, base, end int) int {
	rest := chain[base+1 : end]
	path := r.path
	for i, h := range rest {
		if len(path) < 4 {
			return 1 + i
		}
		f := uint32(path[0]) | uint32(path[1])<<8 | uint32(path[2])<<16 | uint32(path[3])<<24
		if f != fingerprint(h) {
			return 1 + i
		}
		path = path[4:]
	}
	return 1 + len(rest)
}

// extend makes the run's path that of chain from base to end, of which the present path is a beginning.
func (r *run) extend(chain []block.Hash, base, end int) {
	path := make([]byte, 0, 4*(end-base-1))
	for _, h := range chain[base+1 : end] {
		path = binary.LittleEndian.AppendUint32(path, fingerprint(h))
	}
	r.path = string(path)
}

// covers reports whether the holder's claim on blocks was touched at or after since.
func (r *run) covers(holder uint64, blocks int, since int64) bool {
	for _, c := range r.claims {
		if c.holder == holder && int(c.blocks) >= blocks && c.at >= since && r.valid(c) {
			return true
		}
	}
	return false
}

// touch records that the holder has the first blocks of the run, as of at. Claims older than expired are dropped on
// the way.
func (r *run) touch(holder uint64, blocks int, at, expired int64) {
	add := claim{holder: holder, at: at, blocks: uint16(blocks), check: r.checkOf(blocks)}
	kept := r.claims[:0]
	steps := 0
	dominated := false
	for _, c := range r.claims {
		if c.at < expired {
			continue
		}
		if c.holder == holder {
			if !r.valid(c) || (c.blocks <= add.blocks && c.at <= add.at) {
				continue
			}
			if c.blocks >= add.blocks && c.at >= add.at {
				dominated = true
			}
			steps++
		}
		kept = append(kept, c)
	}
	r.claims = kept
	if dominated {
		return
	}
	// One holder's claims stay ordered: blocks falling, at rising.
	at0 := len(r.claims)
	for i, c := range r.claims {
		if c.holder == holder && c.blocks < add.blocks {
			at0 = i
			break
		}
	}
	if len(r.claims) == cap(r.claims) {
		// Grow by little: a run rarely has more claims than there are replicas, and Go's doubling would be most of its size.
		r.claims = slices.Grow(r.claims, 1+len(r.claims)/4)
	}
	r.claims = slices.Insert(r.claims, at0, add)
	if steps+1 > maxSteps {
		r.dropStep(holder)
	}
}

// dropStep removes the claim of the holder whose removal costs least: its blocks then count as last touched when the next
// deeper claim was. The deepest and the newest stay.
func (r *run) dropStep(holder uint64) {
	prev, worst, gap := -1, -1, int64(0)
	last := -1
	for i, c := range r.claims {
		if c.holder == holder {
			last = i
		}
	}
	for i, c := range r.claims {
		if c.holder != holder {
			continue
		}
		if prev >= 0 && i != last {
			if g := c.at - r.claims[prev].at; worst < 0 || g < gap {
				worst, gap = i, g
			}
		}
		prev = i
	}
	if worst >= 0 {
		r.claims = slices.Delete(r.claims, worst, worst+1)
	}
}

// remember keeps the offset of a nested run as the most recently touched. It reports whether anything changed that
// another gateway should learn: a new offset, or one that had become half forgotten.
func (r *run) remember(offset int) bool {
	o := uint16(offset)
	i := slices.Index(r.nested, o)
	if i >= 0 && i >= len(r.nested)-maxNested/2 {
		return false
	}
	if i >= 0 {
		r.nested = slices.Delete(r.nested, i, i+1)
	} else if len(r.nested) >= maxNested {
		r.nested = slices.Delete(r.nested, 0, len(r.nested)-maxNested+1)
	}
	r.nested = append(r.nested, o)
	return true
}

func (r *run) clone() *run {
	return &run{path: r.path, claims: slices.Clone(r.claims), nested: slices.Clone(r.nested)}
}

// query is one lookup's working state; pooled.
type query struct {
	chain []block.Hash
	heads []int
	keys  []uint64 // of the holders
	minAt []int64  // claims older than this do not count
	best  []int    // blocks found for each holder
	same  []int    // index of the first holder with the same key
	slots []int16  // open-addressing table of key to index, -1 free
	mask  uint64
}

var queries = sync.Pool{New: func() any { return new(query) }}

// newQuery prepares a lookup. release returns it to the pool.
func newQuery(chain []block.Hash, holders []Holder, now, ttl int64, forgotten *forgotten) *query {
	q, _ := queries.Get().(*query)
	q.chain = chain
	q.heads = appendHeads(q.heads[:0], len(chain))
	n := len(holders)
	q.keys = slices.Grow(q.keys[:0], n)[:n]
	q.minAt = slices.Grow(q.minAt[:0], n)[:n]
	q.best = slices.Grow(q.best[:0], n)[:n]
	q.same = slices.Grow(q.same[:0], n)[:n]
	size := 1 << bits.Len(uint(2*n))
	q.slots = slices.Grow(q.slots[:0], size)[:size]
	q.mask = uint64(size - 1)
	for i := range q.slots {
		q.slots[i] = -1
	}
	for i, h := range holders {
		key := holderKey(h.ID)
		age := ttl
		if h.MaxAge > 0 {
			age = min(age, h.MaxAge.Milliseconds())
		}
		q.keys[i] = key
		q.minAt[i] = max(now-age, forgotten.at(key)+1)
		q.best[i] = 0
		q.same[i] = i
		s := key & q.mask
		for q.slots[s] >= 0 && q.keys[q.slots[s]] != key {
			s = (s + 1) & q.mask
		}
		if q.slots[s] >= 0 {
			q.same[i] = int(q.slots[s])
			continue
		}
		q.slots[s] = int16(i)
	}
	return q
}

func (q *query) release() {
	q.chain = nil
	queries.Put(q)
}

// find returns the index of the holder with the key, or -1.
func (q *query) find(key uint64) int {
	s := key & q.mask
	for {
		i := q.slots[s]
		if i < 0 || q.keys[i] == key {
			return int(i)
		}
		s = (s + 1) & q.mask
	}
}

// end returns where the segment of the k-th head ends in this chain.
func (q *query) end(k int) int {
	if k+1 < len(q.heads) {
		return q.heads[k+1]
	}
	return len(q.chain)
}

// credit counts the claims of the run at base, of whose path the chain shares the first shared blocks.
func (q *query) credit(r *run, base, shared int) {
	for _, c := range r.claims {
		i := q.find(c.holder)
		if i < 0 || c.at < q.minAt[i] || !r.valid(c) {
			continue
		}
		q.best[i] = max(q.best[i], base+min(int(c.blocks), shared))
	}
}

// settled reports whether every holder has been found: no shallower segment can tell more.
func (q *query) settled() bool {
	for i, n := range q.best {
		if n == 0 && q.same[i] == i {
			return false
		}
	}
	return true
}

// write sets dst to the larger of what it holds and what was found.
func (q *query) write(dst []int) {
	for i := range dst {
		dst[i] = max(dst[i], q.best[q.same[i]])
	}
}

// forgotten remembers until when what was recorded of a holder is nobody's.
type forgotten struct {
	mu sync.RWMutex
	m  map[uint64]int64 // holder key to Unix milliseconds; guarded by mu
}

// at returns the time up to which claims of the holder do not count; 0 if it was never forgotten.
func (f *forgotten) at(holder uint64) int64 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.m[holder]
}

// raise forgets all recorded of the holder before now. Time moves on by a millisecond where a record came after another forgetting
// in the same one.
func (f *forgotten) raise(holder uint64, now, expired int64) {
	f.set(holder, max(now, f.at(holder)+1), expired)
}

// set raises the holder's time to at and drops entries before expired, whose claims are gone by themselves.
func (f *forgotten) set(holder uint64, at, expired int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.m == nil {
		f.m = make(map[uint64]int64)
	}
	f.m[holder] = max(f.m[holder], at)
	for k, t := range f.m {
		if t < expired {
			delete(f.m, k)
		}
	}
}

// each calls fn for every entry that is not before expired.
func (f *forgotten) each(expired int64, fn func(holder uint64, at int64)) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for k, t := range f.m {
		if t >= expired {
			fn(k, t)
		}
	}
}
