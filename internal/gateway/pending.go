package gateway

import (
	"slices"
	"sync"

	"prefixgate/internal/block"
	"prefixgate/internal/replica"
)

// pending knows the prefixes that replicas are computing right now: those of requests that this gateway sent and that have
// not answered yet. The index hears of a prefix only once a replica has computed it, but a second request with the same
// prefix belongs to the same replica already: it waits behind the first there and then finds the blocks in the cache,
// while any other replica would compute them again. Nothing has to be taken back when the first request fails or is
// canceled: its entry ends with it.
//
// Entries are found by the hash of a chain's first block. Its methods are safe for concurrent use.
type pending struct {
	shards [pendingShards]pendingShard
}

const (
	pendingShards = 64
	// pendingScan bounds how many entries with the same first block one match looks at, the latest first: a fleet's common
	// system prompt may be in thousands.
	pendingScan = 512
)

type pendingShard struct {
	mu sync.Mutex
	// flights is guarded by mu.
	flights map[block.Hash][]*flight
}

// flight is one prompt on its way to one replica.
type flight struct {
	id    replica.ID
	chain []block.Hash
}

// add notes that chain is being computed on a replica. chain must not change until the flight is removed. It returns nil
// for a prompt without a full block.
func (p *pending) add(id replica.ID, chain []block.Hash) *flight {
	if len(chain) == 0 {
		return nil
	}
	f := &flight{id: id, chain: chain}
	s := p.shard(chain[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flights == nil {
		s.flights = make(map[block.Hash][]*flight)
	}
	s.flights[chain[0]] = append(s.flights[chain[0]], f)
	return f
}

// remove ends a flight; nil, or one that has ended, does nothing.
func (p *pending) remove(f *flight) {
	if f == nil {
		return
	}
	s := p.shard(f.chain[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.flights[f.chain[0]]
	i := slices.Index(list, f)
	if i < 0 {
		return
	}
	list = slices.Delete(list, i, i+1)
	if len(list) == 0 {
		delete(s.flights, f.chain[0])
	} else {
		s.flights[f.chain[0]] = list
	}
}

// match raises dst[i] to the number of leading blocks of chain that ids[i] is computing.
func (p *pending) match(chain []block.Hash, ids []replica.ID, dst []int) {
	if len(chain) == 0 {
		return
	}
	s := p.shard(chain[0])
	s.mu.Lock()
	defer s.mu.Unlock()
	list := s.flights[chain[0]]
	list = list[max(0, len(list)-pendingScan):]
	at := func(id replica.ID) int { return slices.Index(ids, id) }
	if len(list)*len(ids) > 4096 {
		positions := make(map[replica.ID]int, len(ids))
		for i, id := range ids {
			positions[id] = i
		}
		at = func(id replica.ID) int {
			if i, ok := positions[id]; ok {
				return i
			}
			return -1
		}
	}
	for _, f := range list {
		i := at(f.id)
		if i < 0 || dst[i] >= len(f.chain) || dst[i] >= len(chain) {
			continue
		}
		if shared := commonBlocks(chain, f.chain); shared > dst[i] {
			dst[i] = shared
		}
	}
}

func (p *pending) shard(h block.Hash) *pendingShard {
	return &p.shards[uint64(h)%pendingShards]
}

// commonBlocks returns how many leading blocks two chains share. Hashes are chained, so equality at a position means
// equality before it, and a binary search finds the end.
func commonBlocks(a, b []block.Hash) int {
	low, high := 0, min(len(a), len(b))
	for low < high {
		mid := int(uint(low+high) / 2)
		if a[mid] == b[mid] {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low
}
