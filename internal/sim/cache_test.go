package sim

import (
	"math/rand/v2"
	"slices"
	"testing"

	"prefixgate/internal/block"
)

// slowCache is the same rules written the plain way: slices and scans, one struct a block.
type slowCache struct {
	queue  []int // blocks in no use, oldest first
	refs   []int
	held   map[int]block.Hash
	stored []int // blocks that hold something, in order of storing
}

func newSlowCache(n int) *slowCache {
	s := &slowCache{refs: make([]int, n), held: map[int]block.Hash{}}
	for i := 1; i < n; i++ {
		s.queue = append(s.queue, i)
	}
	return s
}

func (s *slowCache) find(h block.Hash) (int, bool) {
	for _, id := range s.stored {
		if s.held[id] == h {
			return id, true
		}
	}
	return 0, false
}

func (s *slowCache) take() int {
	id := s.queue[0]
	s.queue = s.queue[1:]
	if _, ok := s.held[id]; ok {
		delete(s.held, id)
		s.stored = slices.DeleteFunc(s.stored, func(x int) bool { return x == id })
	}
	s.refs[id] = 1
	return id
}

func (s *slowCache) acquire(reusable []block.Hash, total int) ([]int, int, bool) {
	var hit []int
	for _, h := range reusable[:min(total, len(reusable))] {
		id, ok := s.find(h)
		if !ok {
			break
		}
		hit = append(hit, id)
	}
	free := len(s.queue)
	for _, id := range hit {
		if s.refs[id] == 0 {
			free--
		}
	}
	if total-len(hit) > free {
		return nil, 0, false
	}
	for _, id := range hit {
		s.queue = slices.DeleteFunc(s.queue, func(x int) bool { return x == id })
		s.refs[id]++
	}
	ids := hit
	for range total - len(hit) {
		ids = append(ids, s.take())
	}
	return ids, len(hit), true
}

func (s *slowCache) store(id int, h block.Hash) {
	if _, ok := s.held[id]; !ok {
		s.held[id] = h
		s.stored = append(s.stored, id)
	}
}

func (s *slowCache) release(ids []int) {
	for _, id := range slices.Backward(ids) {
		s.refs[id]--
		if s.refs[id] == 0 {
			s.queue = append(s.queue, id)
		}
	}
}

// Random prompts that share prefixes come, grow and go over a small pool; block by block the fast cache does what the plain
// one does.
func TestCacheEqualsTheRulesWrittenPlainly(t *testing.T) {
	type user struct {
		fast  []BlockID
		slow  []int
		chain []block.Hash
	}
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n := 2 + rng.IntN(40)
		fast, slow := NewCache(n), newSlowCache(n)
		var users []user
		for step := range 400 {
			switch op := rng.IntN(10); {
			case op < 5:
				chain := randomChain(rng, 1+rng.IntN(12))
				limit := rng.IntN(len(chain) + 1)
				total := limit + rng.IntN(len(chain)+2-limit)
				fb, fh, fok := fast.Acquire(nil, chain[:limit], total)
				sb, sh, sok := slow.acquire(chain[:limit], total)
				if fh != sh || fok != sok || !same(fb, sb) {
					t.Fatalf("seed %d step %d: Acquire = %v, %d, %v, want %v, %d, %v", seed, step, fb, fh, fok, sb, sh, sok)
				}
				if !fok {
					break
				}
				for i := fh; i < min(len(chain), len(fb)); i++ {
					fast.Store(fb[i], chain[i])
					slow.store(sb[i], chain[i])
				}
				users = append(users, user{fb, sb, chain})
			case op < 7 && len(users) > 0:
				u := &users[rng.IntN(len(users))]
				id, ok := fast.Grow()
				if ok != (len(slow.queue) > 0) {
					t.Fatalf("seed %d step %d: Grow = %v with %d blocks free", seed, step, ok, len(slow.queue))
				}
				if ok {
					sid := slow.take()
					if int(id) != sid {
						t.Fatalf("seed %d step %d: Grow = %d, want %d", seed, step, id, sid)
					}
					if i := len(u.fast); i < len(u.chain) && rng.IntN(2) == 0 {
						fast.Store(id, u.chain[i])
						slow.store(sid, u.chain[i])
					}
					u.fast, u.slow = append(u.fast, id), append(u.slow, sid)
				}
			case op < 10 && len(users) > 0:
				i := rng.IntN(len(users))
				fast.Release(users[i].fast)
				slow.release(users[i].slow)
				users = slices.Delete(users, i, i+1)
			}
			if rng.IntN(50) == 0 {
				if got, want := fast.Reset(), len(slow.queue) == n-1; got != want {
					t.Fatalf("seed %d step %d: Reset = %v, want %v", seed, step, got, want)
				} else if got {
					slow.held, slow.stored = map[int]block.Hash{}, nil
				}
			}
			if fast.Free() != len(slow.queue) || fast.Used() != n-1-len(slow.queue) {
				t.Fatalf("seed %d step %d: Free, Used = %d, %d, want %d, %d", seed, step, fast.Free(), fast.Used(), len(slow.queue), n-1-len(slow.queue))
			}
			probe := randomChain(rng, 12)
			want := 0
			for want < len(probe) {
				if _, ok := slow.find(probe[want]); !ok {
					break
				}
				want++
			}
			if got := fast.Match(probe); got != want {
				t.Fatalf("seed %d step %d: Match = %d, want %d", seed, step, got, want)
			}
		}
	}
}

// randomChain is the chain of a prompt out of a small tree, so that prefixes are shared.
func randomChain(rng *rand.Rand, n int) []block.Hash {
	chain := make([]block.Hash, n)
	prev := uint64(0)
	for i := range chain {
		prev = mix(prev*3 + uint64(1+rng.IntN(2)*rng.IntN(2)))
		chain[i] = block.Hash(prev)
	}
	return chain
}

func same(fast []BlockID, slow []int) bool {
	return slices.EqualFunc(fast, slow, func(a BlockID, b int) bool { return int(a) == b })
}

func TestOneBlockIsNeverUsable(t *testing.T) {
	c := NewCache(8)
	if _, _, ok := c.Acquire(nil, nil, 8); ok {
		t.Error("Acquire(8 blocks of 8) succeeded, want one block kept back")
	}
	if _, _, ok := c.Acquire(nil, nil, 7); !ok {
		t.Error("Acquire(7 blocks of 8) did not succeed")
	}
}

func TestLastBlockOfARequestIsEvictedFirst(t *testing.T) {
	c := NewCache(5)
	chain := []block.Hash{1, 2, 3, 4}
	ids, _, _ := c.Acquire(nil, nil, 4)
	for i, id := range ids {
		c.Store(id, chain[i])
	}
	c.Release(ids)
	for want := 3; want >= 0; want-- {
		if _, ok := c.Grow(); !ok {
			t.Fatal("Grow found no block in a cache that nobody uses")
		}
		if got := c.Match(chain); got != want {
			t.Fatalf("after %d evictions %d leading blocks are left, want %d", 4-want, got, want)
		}
	}
	if got := c.Evictions(); got != 4 {
		t.Errorf("Evictions() = %d, want 4", got)
	}
}

func TestACopyOutlivesItsTwin(t *testing.T) {
	c := NewCache(4)
	first, _, _ := c.Acquire(nil, nil, 1)
	second, _, _ := c.Acquire(nil, nil, 1)
	c.Store(first[0], 9)
	c.Store(second[0], 9)
	c.Release(first)
	c.Release(second)
	for i, want := range []int{1, 1, 0} { // The third block was never used, so it goes first; then first, then second.
		if _, ok := c.Grow(); !ok {
			t.Fatal("Grow found no block")
		}
		if got := c.Match([]block.Hash{9}); got != want {
			t.Errorf("after taking %d blocks Match = %d, want %d", i+1, got, want)
		}
	}
}

func TestAFullButIdleCacheReadsZero(t *testing.T) {
	c := NewCache(11)
	ids, _, _ := c.Acquire(nil, nil, 10)
	if got := c.Usage(); got != 1 {
		t.Errorf("Usage() = %v with every block in use, want 1", got)
	}
	for i, id := range ids {
		c.Store(id, block.Hash(i+1))
	}
	c.Release(ids)
	if c.Usage() != 0 || c.Stored() != 10 {
		t.Errorf("Usage(), Stored() = %v, %d when idle, want 0, 10", c.Usage(), c.Stored())
	}
}
