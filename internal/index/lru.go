package index

import (
	"sync"
	"sync/atomic"

	"prefixgate/internal/block"
)

const shards = 64

// lru is a sharded map from a run's name to a value, bounded in bytes: the least recently touched go first. Each shard has
// its own order and its own share of the bound, which for hashes as keys is as good as one.
type lru[V any] struct {
	shard [shards]shard[V]
	bytes atomic.Int64
	count atomic.Int64
}

type shard[V any] struct {
	mu       sync.RWMutex
	m        map[block.Hash]*node[V] // guarded by mu
	newest   *node[V]                // guarded by mu
	oldest   *node[V]                // guarded by mu
	bytes    int64                   // guarded by mu
	maxBytes int64
	all      *lru[V]
}

type node[V any] struct {
	v            V
	key          block.Hash
	newer, older *node[V]
	touched      int64 // Unix milliseconds
	bytes        int32
}

func newLRU[V any](maxBytes int64) *lru[V] {
	l := &lru[V]{}
	for i := range l.shard {
		l.shard[i] = shard[V]{m: make(map[block.Hash]*node[V]), maxBytes: max(maxBytes/shards, 1), all: l}
	}
	return l
}

// of returns the shard of a key. The top bits choose it: the map uses its own hash, and fingerprints the low ones.
func (l *lru[V]) of(h block.Hash) *shard[V] { return &l.shard[uint64(h)>>58] }

// putLocked adds a key that is not there, or takes over the changed size of one that is, marks it most recently touched, and
// evicts what is beyond the bound or was last touched before expired. The node itself may be evicted, if it alone is larger
// than the bound.
func (s *shard[V]) putLocked(n *node[V], size int32, now, expired int64) {
	if _, ok := s.m[n.key]; !ok {
		s.m[n.key] = n
		s.all.count.Add(1)
	} else {
		s.unlinkLocked(n)
	}
	s.all.bytes.Add(int64(size - n.bytes))
	s.bytes += int64(size - n.bytes)
	n.bytes = size
	n.touched = now
	n.older = s.newest
	if s.newest != nil {
		s.newest.newer = n
	}
	s.newest = n
	if s.oldest == nil {
		s.oldest = n
	}
	for s.oldest != nil && (s.bytes > s.maxBytes || s.oldest.touched < expired) {
		s.removeLocked(s.oldest)
	}
}

func (s *shard[V]) unlinkLocked(n *node[V]) {
	if n.newer != nil {
		n.newer.older = n.older
	} else {
		s.newest = n.older
	}
	if n.older != nil {
		n.older.newer = n.newer
	} else {
		s.oldest = n.newer
	}
	n.newer, n.older = nil, nil
}

func (s *shard[V]) removeLocked(n *node[V]) {
	s.unlinkLocked(n)
	delete(s.m, n.key)
	s.bytes -= int64(n.bytes)
	s.all.bytes.Add(-int64(n.bytes))
	s.all.count.Add(-1)
}

// expire removes what was last touched before expired.
func (l *lru[V]) expire(expired int64) {
	for i := range l.shard {
		s := &l.shard[i]
		s.mu.Lock()
		for s.oldest != nil && s.oldest.touched < expired {
			s.removeLocked(s.oldest)
		}
		s.mu.Unlock()
	}
}
