// Package indextest holds what every index must do, as tests: a conformance suite and a model-based property test that
// compares an index with a reference too simple to be wrong.
package indextest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/replica"
)

// Index is what the suite tests.
type Index interface {
	Match(ctx context.Context, chain []block.Hash, holders []index.Holder, dst []int) error
	Record(id replica.ID, chain []block.Hash)
	Forget(id replica.ID)
	Close() error
}

// Clock is a clock that tests move by hand. It is safe for concurrent use.
type Clock struct {
	mu  sync.Mutex
	now time.Time // guarded by mu
}

// NewClock returns a clock at a fixed time.
func NewClock() *Clock {
	return &Clock{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
}

// Now returns the clock's time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the clock forward.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// Backend makes an index to test.
type Backend struct {
	// New returns an empty index with the options, whose clock is set. The test closes it.
	New func(tb testing.TB, opts index.Options) Index
	// Settle waits until what was recorded before can be matched; nil if that is at once.
	Settle func(tb testing.TB, x Index)
	// Rounds is how many random histories the property test goes through; 0 means 40.
	Rounds int
}

func (b Backend) settle(tb testing.TB, x Index) {
	tb.Helper()
	if b.Settle != nil {
		b.Settle(tb, x)
	}
}

// ID returns the i-th replica of tests.
func ID(i int) replica.ID {
	return replica.ID{Addr: fmt.Sprintf("http://10.0.0.%d:8000", i), Start: 1_796_088_447_000_000}
}

// Holders returns Holders of replicas 0 to n-1 without an age limit.
func Holders(n int) []index.Holder {
	h := make([]index.Holder, n)
	for i := range h {
		h[i].ID = ID(i)
	}
	return h
}

// Chain returns a chain of n random blocks.
func Chain(rng *rand.Rand, n int) []block.Hash {
	c := make([]block.Hash, n)
	for i := range c {
		c[i] = block.Hash(rng.Uint64())
	}
	return c
}

// Fork returns a chain that shares the first keep blocks with c and has n in all.
func Fork(rng *rand.Rand, c []block.Hash, keep, n int) []block.Hash {
	return append(slices.Clone(c[:keep]), Chain(rng, n-keep)...)
}

// Run tests the backend.
func Run(t *testing.T, b Backend) {
	t.Helper()
	t.Run("story", func(t *testing.T) { b.story(t) })
	t.Run("lengths", func(t *testing.T) { b.lengths(t) })
	t.Run("forks", func(t *testing.T) { b.forks(t) })
	t.Run("ages", func(t *testing.T) { b.ages(t) })
	t.Run("model", func(t *testing.T) { b.model(t) })
	t.Run("races", func(t *testing.T) { b.races(t) })
}

func (b Backend) start(t *testing.T, clock *Clock, opts index.Options) Index {
	t.Helper()
	opts.Clock = clock.Now
	x := b.New(t, opts)
	t.Cleanup(func() {
		if err := x.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return x
}

func (b Backend) story(t *testing.T) {
	t.Helper()
	clock := NewClock()
	x := b.start(t, clock, index.Options{})
	rng := rand.New(rand.NewPCG(1, 1))
	chain := Chain(rng, 100)
	holders := Holders(3)
	want := func(chain []block.Hash, want ...int) {
		t.Helper()
		b.settle(t, x)
		got := []int{-7, -7, -7}
		if err := x.Match(t.Context(), chain, holders, got); err != nil {
			t.Fatalf("Match(%d blocks): %v", len(chain), err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("Match(%d blocks) = %v, want %v", len(chain), got, want)
		}
	}
	want(nil, 0, 0, 0)
	want(chain, 0, 0, 0)
	x.Record(ID(0), nil)
	want(chain, 0, 0, 0)
	x.Record(ID(0), chain[:60])
	want(chain, 60, 0, 0)
	want(chain[:10], 10, 0, 0)
	x.Record(ID(1), chain[:1])
	want(chain, 60, 1, 0)
	// A conversation grows.
	x.Record(ID(0), chain)
	want(chain, 100, 1, 0)
	// A spill to a third replica leaves the others what they have.
	x.Record(ID(2), chain[:99])
	want(chain, 100, 1, 99)
	// Another prompt that parts in the middle of a segment.
	other := Fork(rng, chain, 45, 90)
	want(other, 45, 1, 45)
	x.Record(ID(1), other)
	want(other, 45, 90, 45)
	want(chain, 100, 45, 99)
	// A reset cache owns nothing; what is recorded after counts, even in the same instant.
	x.Forget(ID(0))
	want(chain, 0, 45, 99)
	x.Record(ID(0), chain[:7])
	want(chain, 7, 45, 99)
	// A restarted replica is somebody else, and has nothing.
	holders[2].ID.Start++
	want(chain, 7, 45, 0)
	x.Record(holders[2].ID, chain[:50])
	want(chain, 7, 45, 50)
	holders[2].ID.Start--
	want(chain, 7, 45, 99)
	// Asked twice in one call, a holder is found twice.
	holders[1] = holders[2]
	want(chain, 7, 99, 99)
}

// lengths: a prefix of any length is found exactly, whatever the prompt's.
func (b Backend) lengths(t *testing.T) {
	t.Helper()
	x := b.start(t, NewClock(), index.Options{})
	rng := rand.New(rand.NewPCG(2, 2))
	lengths := []int{1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 319, 320, 321, 511, 512, 513, 1000, 1024, 4095, 4096, 4097, 5119, 5120, 6249, 6250, 20000}
	for _, n := range lengths {
		chain := Chain(rng, n)
		holders := Holders(8)
		want := make([]int, len(holders))
		for i := range holders {
			want[i] = rng.IntN(n + 1)
			x.Record(ID(i), chain[:want[i]])
		}
		b.settle(t, x)
		got := make([]int, len(holders))
		if err := x.Match(t.Context(), chain, holders, got); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("Match(%d blocks) = %v, want %v", n, got, want)
		}
	}
}

// forks: many conversations on one system prompt, each on a replica of its own, with the system prompt's end at any place.
func (b Backend) forks(t *testing.T) {
	t.Helper()
	x := b.start(t, NewClock(), index.Options{})
	rng := rand.New(rand.NewPCG(3, 3))
	for _, system := range []int{1, 5, 31, 32, 40, 300, 1500} {
		prompt := Chain(rng, system)
		holders := Holders(5)
		type conversation struct {
			chain []block.Hash
			on    int
		}
		var all []conversation
		for range 40 {
			c := conversation{Fork(rng, prompt, system, system+1+rng.IntN(60)), rng.IntN(len(holders))}
			all = append(all, c)
			x.Record(ID(c.on), c.chain)
		}
		b.settle(t, x)
		for _, c := range all {
			next := Fork(rng, c.chain, len(c.chain), len(c.chain)+20)
			got := make([]int, len(holders))
			if err := x.Match(t.Context(), next, holders, got); err != nil {
				t.Fatal(err)
			}
			for i, n := range got {
				want := system
				if i == c.on {
					want = len(c.chain)
				}
				if n != want {
					t.Errorf("Match(conversation of %d blocks on a system prompt of %d)[%d] = %d, want %d", len(c.chain), system, i, n, want)
				}
			}
		}
	}
}

// ages: what nobody touches fades, for each holder at its own age, and what is touched does not.
func (b Backend) ages(t *testing.T) {
	t.Helper()
	clock := NewClock()
	x := b.start(t, clock, index.Options{TTL: 10 * time.Minute, RefreshInterval: 10 * time.Second})
	rng := rand.New(rand.NewPCG(4, 4))
	chain := Chain(rng, 200)
	want := func(maxAge time.Duration, want ...int) {
		t.Helper()
		b.settle(t, x)
		got := make([]int, len(want))
		holders := Holders(len(want))
		for i := range holders {
			holders[i].MaxAge = maxAge
		}
		if err := x.Match(t.Context(), chain, holders, got); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("Match with a maximum age of %v = %v, want %v", maxAge, got, want)
		}
	}
	x.Record(ID(0), chain)
	clock.Advance(4 * time.Minute)
	x.Record(ID(1), chain)
	x.Record(ID(0), chain[:70]) // touches the beginning only
	want(time.Minute, 70, 200)
	want(5*time.Minute, 200, 200)
	want(0, 200, 200)
	clock.Advance(5 * time.Minute)
	want(time.Minute, 0, 0)
	want(6*time.Minute, 70, 200)
	// The cache was enlarged: what it held counts for longer, with nothing rewritten.
	want(9*time.Minute, 200, 200)
	clock.Advance(2 * time.Minute)
	want(0, 70, 200)
	clock.Advance(4 * time.Minute)
	want(0, 0, 0)
}

// model: random histories, compared with the reference after each step.
func (b Backend) model(t *testing.T) {
	t.Helper()
	rounds := b.Rounds
	if rounds == 0 {
		rounds = 40
	}
	for seed := range uint64(rounds) {
		if !b.history(t, seed) {
			t.Fatalf("history %d differs from the reference", seed)
		}
	}
}

func (b Backend) history(t *testing.T, seed uint64) bool {
	t.Helper()
	const ttl = 10 * time.Minute
	clock := NewClock()
	// A tiny refresh interval makes ages exact.
	x := b.start(t, clock, index.Options{TTL: ttl, RefreshInterval: time.Millisecond, NearCacheStaleness: []time.Duration{time.Second, -1, time.Hour}[seed%3]})
	defer x.Close()
	ref := newReference(ttl, clock)
	rng := rand.New(rand.NewPCG(seed, 99))
	ids := make([]replica.ID, 4)
	for i := range ids {
		ids[i] = ID(i)
	}
	longest := []int{10, 70, 300, 900}[rng.IntN(4)]
	known := [][]block.Hash{Chain(rng, 1+rng.IntN(longest))}
	// next returns a chain that continues, repeats, cuts or forks one seen before; or a new one.
	next := func() []block.Hash {
		from := known[rng.IntN(len(known))]
		switch p := rng.IntN(10); {
		case p < 3:
			return Fork(rng, from, len(from), len(from)+rng.IntN(1+longest/4))
		case p < 5:
			return from
		case p < 6:
			return from[:rng.IntN(len(from)+1)]
		case p < 9:
			keep := rng.IntN(len(from) + 1)
			return Fork(rng, from, keep, keep+rng.IntN(1+longest/4))
		default:
			return Chain(rng, rng.IntN(longest))
		}
	}
	ok := true
	for step := range 120 {
		i := rng.IntN(len(ids))
		switch p := rng.IntN(20); {
		case p < 11:
			c := next()
			x.Record(ids[i], c)
			ref.record(ids[i], c)
			if len(c) > 0 && len(known) < 40 {
				known = append(known, c)
			}
		case p < 12:
			x.Forget(ids[i])
			ref.forget(ids[i])
		case p < 13:
			ids[i].Start++
		case p < 17:
			clock.Advance(time.Duration(1+rng.IntN(100_000)) * time.Millisecond)
		}
		b.settle(t, x)
		chain := next()
		holders := make([]index.Holder, len(ids))
		want := make([]int, len(ids))
		for i, id := range ids {
			holders[i].ID = id
			if rng.IntN(2) == 0 {
				holders[i].MaxAge = time.Duration(1+rng.IntN(400_000)) * time.Millisecond
			}
			want[i] = ref.match(holders[i], chain)
		}
		got := make([]int, len(ids))
		if err := x.Match(t.Context(), chain, holders, got); err != nil {
			t.Errorf("step %d: Match: %v", step, err)
			return false
		}
		if !slices.Equal(got, want) {
			t.Errorf("step %d: Match(%d blocks) = %v, want %v", step, len(chain), got, want)
			ok = false
			break
		}
	}
	return ok
}

// reference holds the time of the last touch for every block and holder, and nothing else.
type reference struct {
	ttl     time.Duration
	clock   *Clock
	touched map[replica.ID]map[block.Hash]time.Time
}

func newReference(ttl time.Duration, clock *Clock) *reference {
	return &reference{ttl: ttl, clock: clock, touched: make(map[replica.ID]map[block.Hash]time.Time)}
}

func (r *reference) record(id replica.ID, chain []block.Hash) {
	if r.touched[id] == nil {
		r.touched[id] = make(map[block.Hash]time.Time)
	}
	for _, h := range chain {
		r.touched[id][h] = r.clock.Now()
	}
}

func (r *reference) forget(id replica.ID) { delete(r.touched, id) }

func (r *reference) match(h index.Holder, chain []block.Hash) int {
	limit := r.ttl
	if h.MaxAge > 0 {
		limit = min(limit, h.MaxAge)
	}
	for i, b := range chain {
		at, ok := r.touched[h.ID][b]
		if !ok || r.clock.Now().Sub(at) > limit {
			return i
		}
	}
	return len(chain)
}

// races: everything at once, for the race detector; and a match never exceeds the chain.
func (b Backend) races(t *testing.T) {
	t.Helper()
	clock := NewClock()
	x := b.start(t, clock, index.Options{MaxMemoryBytes: 1 << 18, NearCacheBytes: 1 << 18, QueueLength: 64})
	rng := rand.New(rand.NewPCG(5, 5))
	prompts := make([][]block.Hash, 20)
	for i := range prompts {
		prompts[i] = Chain(rng, 50+rng.IntN(200))
	}
	var wg sync.WaitGroup
	for g := range 32 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 6))
			holders := Holders(4)
			dst := make([]int, 4)
			for range 60 {
				p := prompts[rng.IntN(len(prompts))]
				c := Fork(rng, p, rng.IntN(len(p)), len(p))
				switch rng.IntN(6) {
				case 0, 1:
					x.Record(ID(rng.IntN(4)), c)
				case 2:
					clock.Advance(time.Millisecond)
				case 3:
					if rng.IntN(20) == 0 {
						x.Forget(ID(rng.IntN(4)))
					}
				default:
					// Under load a lookup may run out of time; what it answers must make sense anyway.
					_ = x.Match(t.Context(), c, holders, dst)
					for _, n := range dst {
						if n < 0 || n > len(c) {
							t.Errorf("Match(%d blocks) = %v", len(c), dst)
						}
					}
				}
			}
		})
	}
	wg.Wait()
}
