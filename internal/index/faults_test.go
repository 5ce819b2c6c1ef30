package index_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/testenv"

	"github.com/redis/go-redis/v9"
)

// checkOutage checks that gateways behaved while fault lasted and the lookups went on: they left Redis alone but for a few probes, and
// said so in a line or two.
func checkOutage(t *testing.T, l *traffic, fault func(), lookups int64) {
	t.Helper()
	skipped := make([]float64, len(l.gws))
	for i, g := range l.gws {
		skipped[i] = g.metric(t, "prefixgate_index_lookups_total", "skipped")
	}
	fault()
	for i, g := range l.gws {
		eventually(t, "redis given up", func() bool { return g.metric(t, "prefixgate_index_lookups_total", "skipped") > skipped[i] })
		if g.metric(t, "prefixgate_redis_up") != 0 {
			t.Errorf("gateway %d: redis_up is not 0 while Redis is left alone", i)
		}
	}
	type count struct {
		dials, trips int64
		failed       float64
	}
	before := make([]count, len(l.gws))
	for i, g := range l.gws {
		before[i] = count{g.hook.dials.Load(), g.hook.trips.Load(), g.metric(t, "prefixgate_index_lookups_total", "failed")}
	}
	start, done := time.Now(), l.lookups.Load()
	l.more(lookups)
	probes := int64(time.Since(start)/(50*time.Millisecond)) + 2
	for i, g := range l.gws {
		// A probe may need two connections: the pool's and the one for pipelines. A few lookups were on their way.
		most := 2*probes + 12
		if dials, trips := g.hook.dials.Load()-before[i].dials, g.hook.trips.Load()-before[i].trips; dials > most || trips > most {
			t.Errorf("gateway %d: %d lookups and %d probes at most made %d dials and %d exchanges with a Redis that is away",
				i, l.lookups.Load()-done, probes, dials, trips)
		}
		// Those that were on their way: no other lookup waits.
		if n := g.metric(t, "prefixgate_index_lookups_total", "failed") - before[i].failed; n > 12 {
			t.Errorf("gateway %d: %v lookups waited for a Redis that is away", i, n)
		}
		if n := g.logs.lines(); n > 2 {
			t.Errorf("gateway %d logged %d lines:\n%s", i, n, g.logs)
		}
	}
}

// checkEnd checks that the gateways share again and agree, that no lookup failed for good, and that none hung.
func checkEnd(t *testing.T, l *traffic) {
	t.Helper()
	rng := rand.New(rand.NewPCG(21, 21))
	for i, g := range l.gws {
		to := l.gws[(i+1)%len(l.gws)]
		eventually(t, "recovery", func() bool { return g.metric(t, "prefixgate_redis_up") == 1 && shares(t, rng, g, to) })
	}
	l.more(200)
	l.settled()
	if longest := time.Duration(l.longest.Load()); longest > 10*time.Second {
		t.Errorf("a lookup took %v, with a timeout of 100 ms", longest)
	}
}

// Elsewhere the code that fails open never ran, because a Redis that is frozen gives no error.
func TestFrozen(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	address := "redis://" + s.Addr
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(300)
	checkOutage(t, l, s.Freeze, 1000)
	s.Thaw()
	checkEnd(t, l)
}

// Elsewhere the gateway did not start, or never joined.
func TestAbsentAtTheStart(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	s.Kill()
	address := "redis://" + s.Addr
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	checkOutage(t, l, func() {}, 1000)
	s.Restart()
	checkEnd(t, l)
}

func TestUnresolvable(t *testing.T) {
	t.Parallel()
	l := startTraffic(t, newGateway(t, "redis://does-not-exist.invalid", index.Options{}))
	checkOutage(t, l, func() {}, 500)
	l.end()
	rng := rand.New(rand.NewPCG(1, 1))
	c := indextest.Chain(rng, 50)
	l.gws[0].Record(indextest.ID(0), c)
	dst := make([]int, 1)
	if err := l.gws[0].Match(t.Context(), c, indextest.Holders(1), dst); err != nil || dst[0] != 50 {
		t.Errorf("Match of what was just recorded = %v, %v, want 50 from memory", dst, err)
	}
}

// Elsewhere the pool stayed broken, or the gateways went on believing in what was lost.
func TestKilledAndBackEmpty(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	address := "redis://" + s.Addr
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(300)
	checkOutage(t, l, s.Kill, 1000)
	s.Restart()
	checkEnd(t, l)
	// So quick a restart that nobody noticed: what was written before is written again when it is touched.
	s.Restart()
	rng := rand.New(rand.NewPCG(22, 22))
	eventually(t, "recovery", func() bool { return shares(t, rng, l.gws[0], l.gws[1]) })
	l.settled()
}

// A long absence: many times the probe interval, with the log line's throttle passed several times by the coming and going.
func TestComesAndGoes(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	address := "redis://" + s.Addr
	g := newGateway(t, address, index.Options{})
	l := startTraffic(t, g, newGateway(t, address, index.Options{}))
	for range 6 {
		s.Kill()
		eventually(t, "redis given up", func() bool { return g.metric(t, "prefixgate_redis_up") == 0 })
		s.Restart()
		eventually(t, "redis used", func() bool { return g.metric(t, "prefixgate_redis_up") == 1 })
	}
	if n := g.logs.lines(); n > 6 {
		t.Errorf("6 outages logged %d lines, want those of one or two:\n%s", n, g.logs)
	}
	checkEnd(t, l)
}

// Elsewhere keys without TTL filled the memory, and a write's error failed the request.
func TestFull(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
	address := "redis://" + s.Addr
	g := newGateway(t, address, index.Options{})
	early := indextest.Chain(rand.New(rand.NewPCG(1, 1)), 100)
	g.Record(indextest.ID(0), early)
	flush(t, g.Redis)
	l := startTraffic(t, g, newGateway(t, address, index.Options{}))
	rng := rand.New(rand.NewPCG(2, 2))
	eventually(t, "refused write", func() bool {
		for range 20 {
			g.Record(indextest.ID(1), indextest.Chain(rng, 500))
		}
		flush(t, g.Redis)
		return g.metric(t, "prefixgate_redis_errors_total", "full") > 0
	})
	l.more(500)
	if g.metric(t, "prefixgate_index_records_dropped_total", "refused") == 0 {
		t.Error("no refused record was counted")
	}
	if g.metric(t, "prefixgate_redis_up") != 1 {
		t.Error("a full Redis is no longer read")
	}
	reader := newGateway(t, address, index.Options{})
	eventually(t, "read of a full Redis", func() bool {
		dst := make([]int, 1)
		return reader.Match(t.Context(), early, indextest.Holders(1), dst) == nil && dst[0] == 100
	})
	client := open(t, address)
	for iter := client.Scan(t.Context(), 0, "*", 1000).Iterator(); iter.Next(t.Context()); {
		if ttl := client.PTTL(t.Context(), iter.Val()).Val(); ttl <= 0 {
			t.Fatalf("key %q has no TTL", iter.Val())
		}
	}
	s.Do("CONFIG", "SET", "maxmemory", "0")
	checkEnd(t, l)
}

// In a failover the client may be left with a master that became a replica.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	master, s := testenv.StartRedis(t), testenv.StartRedis(t)
	address := "redis://" + s.Addr
	g := newGateway(t, address, index.Options{})
	l := startTraffic(t, g, newGateway(t, address, index.Options{}))
	l.more(200)
	s.Do("REPLICAOF", "127.0.0.1", master.Port())
	eventually(t, "refused write", func() bool { return g.metric(t, "prefixgate_redis_errors_total", "read_only") > 0 })
	l.more(500)
	if g.metric(t, "prefixgate_redis_up") != 1 {
		t.Error("a read-only Redis is no longer read")
	}
	s.Do("REPLICAOF", "NO", "ONE")
	checkEnd(t, l)
}

// A Redis that loads its data set answers, but nothing of use.
func TestLoading(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t, "--enable-debug-command", "yes", "--key-load-delay", "200", "--loading-process-events-interval-bytes", "1024")
	address := "redis://" + s.Addr
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(200)
	s.Do("DEBUG", "POPULATE", "12000")
	s.Do("SAVE")
	restarted := make(chan struct{})
	checkOutage(t, l, func() {
		go func() {
			defer close(restarted)
			s.Restart()
		}()
	}, 300)
	eventually(t, "error of a loading Redis", func() bool { return l.gws[0].metric(t, "prefixgate_redis_errors_total", "loading") > 0 })
	<-restarted
	checkEnd(t, l)
}

func TestWrongPassword(t *testing.T) {
	t.Parallel()
	const canary = "c4n4ry"
	s := testenv.StartRedis(t, "--requirepass", "right")
	address := "redis://:" + canary + "@" + s.Addr
	g := newGateway(t, address, index.Options{})
	l := startTraffic(t, g, newGateway(t, address, index.Options{}))
	checkOutage(t, l, func() {}, 500)
	if g.metric(t, "prefixgate_redis_errors_total", "auth") == 0 {
		t.Error("no error of kind auth was counted")
	}
	c := indextest.Chain(rand.New(rand.NewPCG(22, 22)), 50)
	if err := g.Match(t.Context(), c, indextest.Holders(1), make([]int, 1)); err != nil && strings.Contains(err.Error(), canary) {
		t.Errorf("error tells the password: %v", err)
	}
	if strings.Contains(g.logs.String(), canary) {
		t.Errorf("log tells the password:\n%s", g.logs)
	}
	s.Do("-a", "right", "CONFIG", "SET", "requirepass", canary)
	checkEnd(t, l)
}

// Somebody else's values under our keys cost the entries they replace, nothing more, and go when they are touched.
func TestWrongTypes(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	address := "redis://" + s.Addr
	g := newGateway(t, address, index.Options{})
	l := startTraffic(t, g, newGateway(t, address, index.Options{}))
	l.more(200)
	client := open(t, address)
	rng := rand.New(rand.NewPCG(3, 3))
	for range 3 {
		keys, err := client.Keys(t.Context(), "pg1:*").Result()
		if err != nil || len(keys) == 0 {
			t.Fatalf("KEYS = %d keys, %v", len(keys), err)
		}
		keys = append(keys, "pg1:forgotten")
		for _, k := range keys {
			client.Del(t.Context(), k)
			switch rng.IntN(5) {
			case 0:
				client.Set(t.Context(), k, "something else", time.Minute)
			case 1:
				client.RPush(t.Context(), k, "a", "b")
			case 2:
				client.HSet(t.Context(), k, "p", "odd", "n", "x", "12345678", strings.Repeat("z", 30), "other", "field")
			case 3:
				client.HSet(t.Context(), k, "p", strings.Repeat("z", 100_000), "12345678", strings.Repeat("\xff", 10))
			default:
				client.ZAdd(t.Context(), k, redis.Z{Score: 1, Member: "m"})
			}
		}
		l.more(300)
	}
	if g.metric(t, "prefixgate_redis_errors_total", "wrong_type") == 0 {
		t.Error("no error of kind wrong_type was counted")
	}
	if g.metric(t, "prefixgate_redis_up") != 1 {
		t.Error("Redis was given up")
	}
	g.Forget(indextest.ID(9))
	eventually(t, "forgotten replica written", func() bool { return client.Type(t.Context(), "pg1:forgotten").Val() == "hash" })
	checkEnd(t, l)
}

// MOVED and ASK while slots move from master to master under load: lookups and records follow, nothing is lost.
func TestResharding(t *testing.T) {
	t.Parallel()
	c := testenv.StartCluster(t)
	address := "redis-cluster://" + strings.Join(c.Addrs(), ",")
	a, b := newGateway(t, address, index.Options{LookupTimeout: 2 * time.Second}), newGateway(t, address, index.Options{LookupTimeout: 2 * time.Second})
	rng := rand.New(rand.NewPCG(4, 4))
	early := indextest.Chain(rng, 3000)
	a.Record(indextest.ID(3), early)
	flush(t, a.Redis)
	l := startTraffic(t, a, b)
	l.more(100)
	for i := range 3 {
		from, to := c.Nodes[i], c.Nodes[(i+1)%3]
		cmd := exec.CommandContext(t.Context(), "redis-cli", "--cluster", "reshard", from.Addr, "--cluster-from", from.Do("CLUSTER", "MYID"),
			"--cluster-to", to.Do("CLUSTER", "MYID"), "--cluster-slots", "400", "--cluster-yes", "--cluster-pipeline", "1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("reshard: %v\n%s", err, out[max(0, len(out)-2000):])
		}
		l.more(100)
	}
	dst := make([]int, 4)
	if err := b.Match(t.Context(), early, indextest.Holders(4), dst); err != nil || dst[3] != len(early) {
		t.Errorf("Match of what was recorded before the slots moved = %v, %v, want %d", dst, err, len(early))
	}
	checkEnd(t, l)
}

// A master dies: its keys are missed until its replica takes over, the others' are not.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	c := testenv.StartCluster(t)
	address := "redis-cluster://" + strings.Join(c.Addrs(), ",")
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(200)
	c.Nodes[1].Kill()
	l.more(500)
	checkEnd(t, l)
	// It comes back as a replica.
	c.Nodes[1].Restart()
	l.settled()
}

// A master hangs: until its replica takes over, lookups wait for it no longer than their time, and get the other masters'
// keys.
func TestClusterNodeFrozen(t *testing.T) {
	t.Parallel()
	c := testenv.StartCluster(t)
	address := "redis-cluster://" + strings.Join(c.Addrs(), ",")
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(200)
	c.Nodes[2].Freeze()
	l.more(500)
	checkEnd(t, l)
	c.Nodes[2].Thaw()
	l.settled()
}

func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	r := testenv.StartSentinel(t)
	address := "redis-sentinel://" + strings.Join(r.Addrs(), ",") + "/" + r.Master
	l := startTraffic(t, newGateway(t, address, index.Options{}), newGateway(t, address, index.Options{}))
	l.more(200)
	r.Servers[0].Kill()
	l.more(200)
	is := func(s *testenv.RedisServer, role string) func() bool {
		return func() bool {
			info, err := s.Try("INFO", "replication") // it closes connections as it changes its role
			return err == nil && strings.Contains(info, "role:"+role)
		}
	}
	eventually(t, "promotion", is(r.Servers[1], "master"))
	r.Servers[0].Restart()
	// Until Sentinel has told it otherwise it takes itself for a master, and who is connected to it is cut off then.
	eventually(t, "demotion", is(r.Servers[0], "slave"))
	checkEnd(t, l)
}

// A full queue drops and counts; Record returns at once even while the writer waits for a Redis that does not answer.
func TestQueueFull(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	// Redis is never given up: every batch waits until its time is over.
	g := newGateway(t, "redis://"+s.Addr, index.Options{QueueLength: 4, BatchSize: 1, FailureThreshold: 1 << 30, WriteTimeout: 200 * time.Millisecond})
	rng := rand.New(rand.NewPCG(5, 5))
	g.Record(indextest.ID(0), indextest.Chain(rng, 10))
	flush(t, g.Redis)
	s.Freeze()
	for range 200 {
		g.Record(indextest.ID(0), indextest.Chain(rng, 100))
	}
	if n := g.metric(t, "prefixgate_index_records_dropped_total", "queue_full"); n < 190 || n > 196 {
		t.Errorf("%v of 200 records were dropped with a queue of 4", n)
	}
	s.Thaw()
	eventually(t, "write after the freeze", func() bool { return shares(t, rng, g, g) })
}

// A Redis that answers, but too late for lookups, is left alone like one that does not, and not taken back and given up
// again by turns.
func TestSlow(t *testing.T) {
	t.Parallel()
	s := testenv.StartRedis(t)
	slow := newSlowProxy(t, s.Addr)
	g := newGateway(t, "redis://"+slow.addr(), index.Options{})
	l := startTraffic(t, g)
	l.more(200)
	slow.delay.Store(int64(300 * time.Millisecond))
	eventually(t, "redis given up", func() bool { return g.metric(t, "prefixgate_redis_up") == 0 })
	failed := g.metric(t, "prefixgate_index_lookups_total", "failed")
	l.more(1000)
	// Those that were on their way.
	if n := g.metric(t, "prefixgate_index_lookups_total", "failed") - failed; n > 12 {
		t.Errorf("%v lookups waited for a slow Redis that had been given up", n)
	}
	slow.delay.Store(0)
	checkEnd(t, l)
}

// A caller that leaves says nothing about Redis: it must not be given up for it.
func TestCallersThatLeave(t *testing.T) {
	t.Parallel()
	g := newGateway(t, "redis://"+testenv.Redis(t), index.Options{})
	rng := rand.New(rand.NewPCG(6, 6))
	eventually(t, "first contact", func() bool { return shares(t, rng, g, g) })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 {
		dst := make([]int, 1)
		if err := g.Match(ctx, indextest.Chain(rng, 10), indextest.Holders(1), dst); !errors.Is(err, context.Canceled) {
			t.Fatalf("Match for a caller that left = %v, want %v", err, context.Canceled)
		}
	}
	if g.metric(t, "prefixgate_redis_up") != 1 {
		t.Error("Redis was given up because callers left")
	}
}

// Gateways of another schema or prefix on one Redis do not see each other's entries.
func TestPrefixesKeepApart(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	a, b := newGateway(t, address, index.Options{KeyPrefix: "blue"}), newGateway(t, address, index.Options{})
	c := indextest.Chain(rand.New(rand.NewPCG(7, 7)), 100)
	a.Record(indextest.ID(0), c)
	flush(t, a.Redis)
	dst := make([]int, 1)
	if err := b.Match(t.Context(), c, indextest.Holders(1), dst); err != nil || dst[0] != 0 {
		t.Errorf("Match under another prefix = %v, %v, want 0", dst, err)
	}
	keys := open(t, address).Keys(t.Context(), "*").Val()
	slices.Sort(keys)
	for _, k := range keys {
		if !strings.HasPrefix(k, "blue1:") {
			t.Errorf("key %q lacks prefix and schema version", k)
		}
	}
	if len(keys) != 4 {
		t.Errorf("100 blocks made %d keys, want 4: %s", len(keys), fmt.Sprint(keys))
	}
}
