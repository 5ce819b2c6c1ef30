package index_test

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/testenv"

	"github.com/prometheus/client_golang/prometheus"
)

// quiet are options under which only the test's own doings reach Redis.
func quiet(opts index.Options) index.Options {
	opts = patient(opts)
	opts.PollInterval = time.Hour
	return opts
}

// started waits until the gateway has exchanged what was forgotten, the only thing it does by itself.
func started(tb testing.TB, g *gateway) {
	tb.Helper()
	eventually(tb, "first contact", func() bool { return g.metric(tb, "prefixgate_redis_up") == 1 })
}

// At most two round trips and about 2 log2 n keys, however long the prompt and wherever it parts from what is known. Elsewhere a
// lookup of a long prompt takes thousands of commands.
func TestLookupCommands(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	rng := rand.New(rand.NewPCG(31, 31))
	writer := newGateway(t, address, quiet(index.Options{}))
	for _, n := range []int{1, 16, 64, 256, 1024, 6250, 62_500} {
		chain := indextest.Chain(rng, n)
		holders := indextest.Holders(8)
		for i := range holders {
			writer.Record(indextest.ID(i), chain[:rng.IntN(n+1)])
		}
		// Some forks, and forks of forks.
		known := [][]block.Hash{chain}
		for range 20 {
			from := known[rng.IntN(len(known))]
			keep := rng.IntN(len(from) + 1)
			c := indextest.Fork(rng, from, keep, min(keep+rng.IntN(100), n))
			if keep < len(c) {
				known = append(known, c)
			}
			writer.Record(indextest.ID(rng.IntN(8)), c)
		}
		flush(t, writer.Redis)
		most := 0
		for range 30 {
			g := newGateway(t, address, quiet(index.Options{}))
			started(t, g)
			from := known[rng.IntN(len(known))]
			keep := rng.IntN(len(from) + 1)
			c := indextest.Fork(rng, from, keep, n)
			trips, keys := g.hook.trips.Load(), g.hook.commands.Load()
			dst := make([]int, 8)
			if err := g.Match(t.Context(), c, holders, dst); err != nil {
				t.Fatal(err)
			}
			if d := g.hook.trips.Load() - trips; d > 2 {
				t.Errorf("Match(%d blocks) took %d round trips", n, d)
			}
			most = max(most, int(g.hook.commands.Load()-keys))
			g.Close()
		}
		if limit := 2*bits.Len(uint(n)) + 12; most > limit {
			t.Errorf("Match(%d blocks) asked for %d keys, want at most %d", n, most, limit)
		}
		t.Logf("%d blocks: at most %d keys", n, most)
	}
}

// More forks of forks in one segment than a lookup asks for make an underestimate of less than the segment, never an
// overestimate; those touched last are found.
func TestManyForksOfForks(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	rng := rand.New(rand.NewPCG(30, 30))
	writer := newGateway(t, address, quiet(index.Options{}))
	first := indextest.Chain(rng, 320) // the last segment starts at 256
	fork := indextest.Fork(rng, first, 260, 320)
	writer.Record(indextest.ID(0), first)
	writer.Record(indextest.ID(1), fork)
	var chains [][]block.Hash
	for keep := 262; keep < 312; keep++ {
		c := indextest.Fork(rng, fork, keep, keep+5)
		chains = append(chains, c)
		writer.Record(indextest.ID(2), c)
		flush(t, writer.Redis)
	}
	exact := 0
	for i, c := range chains {
		g := newGateway(t, address, quiet(index.Options{}))
		started(t, g)
		dst := make([]int, 3)
		if err := g.Match(t.Context(), c, indextest.Holders(3), dst); err != nil {
			t.Fatal(err)
		}
		if dst[2] > len(c) || dst[2] < 256 {
			t.Errorf("Match of fork %d = %d, want at most %d and more than the segments before", i, dst[2], len(c))
		}
		if dst[2] == len(c) {
			exact++
		} else if i > len(chains)-15 {
			t.Errorf("Match of fork %d, one of the last, = %d, want %d", i, dst[2], len(c))
		}
		g.Close()
	}
	if exact == len(chains) {
		t.Error("all were found: this tests nothing")
	}
}

// What is known costs nothing: a prompt seen again, and a conversation's next turn, while the near cache is fresh. A record
// of what Redis has costs nothing either, until it is due for a refresh.
func TestNothingNewCostsNothing(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	clock := indextest.NewClock()
	opts := quiet(index.Options{Clock: clock.Now, NearCacheStaleness: 10 * time.Second, RefreshInterval: 20 * time.Second})
	g := newGateway(t, address, opts)
	started(t, g)
	rng := rand.New(rand.NewPCG(32, 32))
	holders := indextest.Holders(4)
	dst := make([]int, 4)
	// turn returns how many commands one request cost, its lookup and its record.
	turn := func(c []block.Hash, want int) (lookup, record int64) {
		t.Helper()
		n := g.hook.commands.Load()
		if err := g.Match(t.Context(), c, holders, dst); err != nil {
			t.Fatal(err)
		}
		if dst[1] != want {
			t.Errorf("Match(%d blocks) = %v, want %d on replica 1", len(c), dst, want)
		}
		lookup = g.hook.commands.Load() - n
		n = g.hook.commands.Load()
		g.Record(indextest.ID(1), c)
		flush(t, g.Redis)
		return lookup, g.hook.commands.Load() - n - 1 // the exchange of what was forgotten
	}
	const heads = 10 // of 500 blocks: 8 up to 256, 2 up to 512
	c := indextest.Chain(rng, 500)
	if l, r := turn(c, 0); l != heads || r != 2*heads {
		t.Errorf("a new prompt cost %d and %d commands, want %d and %d", l, r, heads, 2*heads)
	}
	if l, r := turn(c, 500); l != 0 || r != 0 {
		t.Errorf("the same prompt again cost %d and %d commands, want none", l, r)
	}
	next := indextest.Fork(rng, c, 500, 505)
	if l, r := turn(next, 500); l != 0 || r != 2 {
		t.Errorf("the next turn cost %d and %d commands, want none and 2", l, r)
	}
	// A fork asks for the one run it may go on in, and makes it.
	fork := indextest.Fork(rng, c, 100, 120)
	if l, r := turn(fork, 100); l != 1 || r != 2 {
		t.Errorf("a fork cost %d and %d commands, want 1 and 2", l, r)
	}
	clock.Advance(11 * time.Second)
	if l, r := turn(c, 500); l != heads || r != 0 {
		t.Errorf("a stale near cache cost %d and %d commands, want %d and none", l, r, heads)
	}
	clock.Advance(11 * time.Second)
	if l, r := turn(c, 500); l != heads || r != 2*heads {
		t.Errorf("a refresh cost %d and %d commands, want %d and %d", l, r, heads, 2*heads)
	}
}

// Replicas that keep blocks for a short time only have their records refreshed the more often.
func TestRefreshFitsTheReplicas(t *testing.T) {
	t.Parallel()
	clock := indextest.NewClock()
	g := newGateway(t, "redis://"+testenv.Redis(t), quiet(index.Options{Clock: clock.Now}))
	started(t, g)
	c := indextest.Chain(rand.New(rand.NewPCG(40, 40)), 20)
	// writes returns how many keys touching the chain wrote.
	writes := func(maxAge time.Duration) float64 {
		t.Helper()
		holders := indextest.Holders(2)
		holders[1].MaxAge = maxAge
		if err := g.Match(t.Context(), c, holders, make([]int, 2)); err != nil {
			t.Fatal(err)
		}
		before := g.metric(t, "prefixgate_index_redis_keys_written_total")
		g.Record(indextest.ID(1), c)
		flush(t, g.Redis)
		return g.metric(t, "prefixgate_index_redis_keys_written_total") - before
	}
	if n := writes(0); n != 1 {
		t.Fatalf("the first record wrote %v keys, want 1", n)
	}
	clock.Advance(3 * time.Second)
	if n := writes(0); n != 0 {
		t.Errorf("a touch after 3 s wrote %v keys, want none", n)
	}
	if n := writes(16 * time.Second); n != 1 {
		t.Errorf("a touch after 3 s wrote %v keys for a replica that keeps blocks for 16 s, want 1", n)
	}
	if n := writes(16 * time.Second); n != 0 {
		t.Errorf("a touch at once wrote %v keys, want none", n)
	}
}

// Scripts would have to be loaded again after each failover, and keys of several slots do not go into one command: the index
// uses neither. The list is that of the rights in the documentation.
func TestCommandsUsed(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	l := startTraffic(t, newGateway(t, "redis://"+s.Addr, index.Options{}), newGateway(t, "redis://"+s.Addr, index.Options{}))
	l.more(300)
	l.gws[0].Forget(indextest.ID(7))
	s.Do("SCRIPT", "FLUSH")
	s.Do("FUNCTION", "FLUSH")
	l.more(300)
	l.end()
	allowed := []string{"hgetall", "hvals", "hset", "hdel", "pexpire", "unlink"}
	for _, g := range l.gws {
		flush(t, g.Redis)
		g.hook.mu.Lock()
		for name, n := range g.hook.names {
			if !slices.Contains(allowed, name) {
				t.Errorf("command %s was used %d times", name, n)
			}
		}
		g.hook.mu.Unlock()
	}
}

// Every key goes within its TTL by itself, without anybody looking for it.
func TestKeysVanish(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	g := newGateway(t, "redis://"+s.Addr, index.Options{TTL: time.Second, RefreshInterval: 100 * time.Millisecond})
	rng := rand.New(rand.NewPCG(33, 33))
	chain := indextest.Chain(rng, 2000)
	g.Record(indextest.ID(0), chain)
	g.Record(indextest.ID(1), indextest.Fork(rng, chain, 333, 444))
	g.Forget(indextest.ID(1))
	flush(t, g.Redis)
	client := open(t, "redis://"+s.Addr)
	if n := client.DBSize(t.Context()).Val(); n < 10 {
		t.Fatalf("%d keys were written", n)
	}
	for _, k := range client.Keys(t.Context(), "*").Val() {
		if ttl := client.PTTL(t.Context(), k).Val(); ttl <= 0 || ttl > 1100*time.Millisecond {
			t.Errorf("key %s has a TTL of %v, want at most 1.1s", k, ttl)
		}
	}
	eventually(t, "empty Redis", func() bool { return client.DBSize(t.Context()).Val() == 0 })
}

// bytesPerBlock fills an index with the conversations that Redis and memory are measured with: a system prompt for 50 of
// them, 1 to 8 turns of 4 to 60 blocks, each on 4 replicas.
func conversations(rng *rand.Rand, blocks int, record func(c []block.Hash)) (made int) {
	var system []block.Hash
	for i := 0; made < blocks; i++ {
		if i%50 == 0 {
			system = indextest.Chain(rng, 10+rng.IntN(150))
			made += len(system)
		}
		c := slices.Clone(system)
		for range 1 + rng.IntN(8) {
			turn := 4 + rng.IntN(57)
			c = indextest.Fork(rng, c, len(c), len(c)+turn)
			made += turn
			record(c)
		}
	}
	return made
}

func TestBytesInRedis(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	client := open(t, "redis://"+s.Addr)
	used := func() int {
		_, rest, _ := strings.Cut(client.Info(t.Context(), "memory").Val(), "used_memory:")
		v, _, _ := strings.Cut(rest, "\r\n")
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	g := newGateway(t, "redis://"+s.Addr, quiet(index.Options{}))
	started(t, g)
	before := used()
	records := 0
	made := conversations(rand.New(rand.NewPCG(34, 34)), 60_000, func(c []block.Hash) {
		for i := range 4 {
			g.Record(indextest.ID(i), c)
		}
		if records += 4; records%1000 == 0 {
			flush(t, g.Redis)
		}
	})
	flush(t, g.Redis)
	perBlock := float64(used()-before) / float64(made)
	t.Logf("%.1f bytes for each of %d blocks on 4 replicas", perBlock, made)
	if perBlock > 200 {
		t.Errorf("Redis holds %.1f bytes for each block, want at most 200", perBlock)
	}
}

func TestMemoryBytes(t *testing.T) {
	t.Parallel()
	// The index's own account of its size is what bounds it; that the account is right is for the benchmark of the heap, and for
	// this: with it, 60,000 blocks on 4 replicas stay far below 100 bytes each.
	reg := prometheus.NewRegistry()
	m := index.NewMemory(index.Options{MaxMemoryBytes: 1 << 40}, reg)
	made := conversations(rand.New(rand.NewPCG(35, 35)), 60_000, func(c []block.Hash) {
		for i := range 4 {
			m.Record(indextest.ID(i), c)
		}
	})
	g := &gateway{reg: reg}
	perBlock := g.metric(t, "prefixgate_index_bytes", "memory") / float64(made)
	t.Logf("%.1f bytes for each of %d blocks on 4 replicas", perBlock, made)
	if perBlock > 100 || perBlock < 4 {
		t.Errorf("memory holds %.1f bytes for each block, want at most 100 and at least the fingerprint's 4", perBlock)
	}
}

// Elsewhere the router ran out of memory after hours. The bound holds, the oldest go first, and what is in use stays.
func TestMemoryIsBounded(t *testing.T) {
	t.Parallel()
	const limit = 2 << 20
	reg := prometheus.NewRegistry()
	m := index.NewMemory(index.Options{MaxMemoryBytes: limit}, reg)
	g := &gateway{reg: reg}
	rng := rand.New(rand.NewPCG(36, 36))
	hot := make([][]block.Hash, 20)
	for i := range hot {
		hot[i] = indextest.Chain(rng, 500)
		m.Record(indextest.ID(0), hot[i])
	}
	old := indextest.Chain(rng, 500)
	m.Record(indextest.ID(0), old)
	for i := range 2500 {
		m.Record(indextest.ID(1), indextest.Chain(rng, 500))
		m.Record(indextest.ID(0), hot[i%len(hot)])
		if n := g.metric(t, "prefixgate_index_bytes", "memory"); i%500 == 0 && n > limit {
			t.Fatalf("%v bytes are held, want at most %d", n, limit)
		}
	}
	dst := make([]int, 1)
	for i, c := range hot {
		m.Match(t.Context(), c, indextest.Holders(1), dst)
		if dst[0] != len(c) {
			t.Errorf("prompt %d in constant use: %d of its %d blocks are left", i, dst[0], len(c))
		}
	}
	if m.Match(t.Context(), old, indextest.Holders(1), dst); dst[0] != 0 {
		t.Errorf("a prompt long out of use still has %d blocks", dst[0])
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("pools forget at random under the race detector")
	}
	m := index.NewMemory(index.Options{}, prometheus.NewRegistry())
	rng := rand.New(rand.NewPCG(37, 37))
	c := indextest.Chain(rng, 6250)
	holders := indextest.Holders(8)
	for i := range holders {
		m.Record(indextest.ID(i), c[:6250*i/8])
	}
	dst := make([]int, 8)
	if n := testing.AllocsPerRun(50, func() { m.Match(t.Context(), c, holders, dst) }); n > 0 {
		t.Errorf("Match allocates %v times, want 0", n)
	}
}

func BenchmarkMatch(b *testing.B) {
	for _, n := range []int{64, 512, 4096} {
		for _, replicas := range []int{2, 16, 128} {
			b.Run(fmt.Sprintf("%dx%d", n, replicas), func(b *testing.B) {
				m := index.NewMemory(index.Options{}, prometheus.NewRegistry())
				c := indextest.Chain(rand.New(rand.NewPCG(38, 38)), n)
				holders := indextest.Holders(replicas)
				for i := range holders {
					m.Record(indextest.ID(i), c[:n*(i+1)/replicas])
				}
				dst := make([]int, replicas)
				b.ReportAllocs()
				for b.Loop() {
					m.Match(b.Context(), c, holders, dst)
				}
			})
		}
	}
}

func BenchmarkRecord(b *testing.B) {
	m := index.NewMemory(index.Options{}, prometheus.NewRegistry())
	rng := rand.New(rand.NewPCG(39, 39))
	chains := make([][]block.Hash, 256)
	for i := range chains {
		chains[i] = indextest.Chain(rng, 512)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		m.Record(indextest.ID(i%8), chains[i%len(chains)])
		i++
	}
}
