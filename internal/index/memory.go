package index

import (
	"context"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"prefixgate/internal/block"
	"prefixgate/internal/replica"

	"github.com/prometheus/client_golang/prometheus"
)

// Holder asks about one life of a replica.
type Holder struct {
	// ID is the replica. Entries of its earlier lives never count.
	ID replica.ID
	// MaxAge is how long the replica is expected to keep a block that nobody touches (see Residence). Entries not touched
	// for longer do not count; 0 leaves the TTL as the only limit.
	MaxAge time.Duration
}

// Memory is the index of one process: exact, bounded in bytes, gone with the process. Its methods are safe for concurrent
// use and never block on anything but short locks.
type Memory struct {
	ttl       int64 // milliseconds
	clock     func() time.Time
	runs      *lru[run]
	forgotten *forgotten
	metrics   *metrics
	nextSweep atomic.Int64 // Unix milliseconds
}

// NewMemory returns an empty index that reports to reg.
func NewMemory(opts Options, reg prometheus.Registerer) *Memory {
	opts = opts.withDefaults()
	m := newMemory(opts, newMetrics(reg), &forgotten{})
	m.metrics.observe(reg, "memory", &m.runs.bytes, &m.runs.count, opts.MaxMemoryBytes)
	return m
}

func newMemory(opts Options, m *metrics, f *forgotten) *Memory {
	return &Memory{
		ttl:       opts.TTL.Milliseconds(),
		clock:     opts.Clock,
		runs:      newLRU[run](opts.MaxMemoryBytes),
		forgotten: f,
		metrics:   m,
	}
}

// Match writes into dst[i] how many leading blocks of chain holders[i] is believed to hold. dst must be as long as holders.
// It does no I/O and always returns nil.
func (m *Memory) Match(_ context.Context, chain []block.Hash, holders []Holder, dst []int) error {
	q := newQuery(chain, holders, m.clock().UnixMilli(), m.ttl, m.forgotten)
	m.match(q)
	clear(dst)
	q.write(dst)
	q.release()
	m.metrics.lookups[resultMemory].Inc()
	return nil
}

// match credits q with what the index knows, deepest segment first: once every holder has been found the rest can tell
// nothing more.
func (m *Memory) match(q *query) {
	for k := len(q.heads) - 1; k >= 0 && !q.settled(); k-- {
		base, end := q.heads[k], q.end(k)
		for base < end {
			s := m.runs.of(q.chain[base])
			s.mu.RLock()
			n := s.m[q.chain[base]]
			if n == nil {
				s.mu.RUnlock()
				break
			}
			shared := n.v.follow(q.chain, base, end)
			q.credit(&n.v, base, shared)
			s.mu.RUnlock()
			base += shared
		}
	}
}

// Record credits the replica with all blocks of chain, as of now.
func (m *Memory) Record(id replica.ID, chain []block.Hash) {
	holder := holderKey(id)
	now := m.clock().UnixMilli()
	// A record in the very millisecond of a Forget comes after it.
	m.record(holder, chain, max(now, m.forgotten.at(holder)+1), now)
	m.metrics.records.Inc()
}

func (m *Memory) record(holder uint64, chain []block.Hash, at, now int64) {
	var stack [64]int
	heads := appendHeads(stack[:0], len(chain))
	expired := now - m.ttl
	end := len(chain)
	// The deepest segment first, so that among a chain's runs the deepest are the first to be evicted, as in the engine.
	for _, head := range slices.Backward(heads) {
		for base := head; base < end; {
			base += m.touch(holder, chain, base, end, at, now, expired)
		}
		end = head
	}
	if next := m.nextSweep.Load(); now >= next && m.nextSweep.CompareAndSwap(next, now+max(m.ttl/8, 1)) {
		m.runs.expire(expired)
	}
}

// touch credits the holder on the run at base and returns how many blocks of the chain that run took.
func (m *Memory) touch(holder uint64, chain []block.Hash, base, end int, at, now, expired int64) int {
	s := m.runs.of(chain[base])
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.m[chain[base]]
	if n == nil {
		n = &node[run]{key: chain[base]}
		n.v.extend(chain, base, end)
	}
	shared := n.v.follow(chain, base, end)
	if shared == n.v.blocks() && shared < end-base {
		n.v.extend(chain, base, end)
		shared = end - base
	}
	n.v.touch(holder, shared, at, expired)
	s.putLocked(n, n.v.size(), now, expired)
	return shared
}

// size returns about how many bytes of memory a run takes, with its node and its place in the map.
func (r *run) size() int32 {
	const mapEntry = 24 // key, pointer and control byte at the map's average load
	return int32(mapEntry + unsafe.Sizeof(node[run]{}) + uintptr(len(r.path)) +
		unsafe.Sizeof(claim{})*uintptr(cap(r.claims)) + 2*uintptr(cap(r.nested)))
}

// Forget makes everything recorded of the replica so far nobody's. Its entries are not searched for: they no longer count,
// and go when their TTL ends.
func (m *Memory) Forget(id replica.ID) {
	now := m.clock().UnixMilli()
	m.forgotten.raise(holderKey(id), now, now-m.ttl)
	m.metrics.forgets.Inc()
}

// Close does nothing; the index is garbage once unused.
func (m *Memory) Close() error { return nil }
