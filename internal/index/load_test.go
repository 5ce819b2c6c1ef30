package index_test

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"
	"prefixgate/internal/replica"
	"prefixgate/internal/testenv"

	"github.com/prometheus/client_golang/prometheus"
)

// sharer is a gateway that shares what it has in flight.
type sharer struct {
	*index.LoadShare
	hook   *hook
	logs   *logBuffer
	tokens atomic.Int64
	ticks  atomic.Int64
	kill   func() // ends Run and with it the share
}

func newSharer(t *testing.T, address, id string) *sharer {
	t.Helper()
	s := &sharer{}
	return s.start(t, address, id, func(dst map[replica.ID]index.Load) {
		s.ticks.Add(1)
		if n := s.tokens.Load(); n > 0 {
			dst[indextest.ID(1)] = index.Load{PrefillTokens: n, Requests: int(n / 10)}
		}
	})
}

// newSharerOf has in flight what local says.
func newSharerOf(t *testing.T, address, id string, local func(dst map[replica.ID]index.Load)) *sharer {
	t.Helper()
	return new(sharer).start(t, address, id, local)
}

func (s *sharer) start(t *testing.T, address, id string, local func(dst map[replica.ID]index.Load)) *sharer {
	t.Helper()
	opts := index.LoadOptions{Interval: 20 * time.Millisecond, TTL: 400 * time.Millisecond}
	client := open(t, address)
	s.hook, s.logs = &hook{names: make(map[string]int)}, &logBuffer{}
	client.AddHook(s.hook)
	s.LoadShare = index.NewLoadShare(client, id, opts, slog.New(slog.NewTextHandler(s.logs, nil)), prometheus.NewRegistry())
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx, local) })
	s.kill = func() { cancel(); wg.Wait() }
	t.Cleanup(s.kill)
	return s
}

// When a replica began with a prompt travels as an age, so clocks need not agree; of two gateways the later counts, since the replica
// has worked on that one's prompt since.
func TestLoadShareTellsWhenPrefillsBegan(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.StartRedis(t).Addr
	seer := newSharer(t, address, "seer")
	began := time.Now().Add(-time.Hour)
	for i, ago := range []time.Duration{0, 30 * time.Minute} {
		newSharerOf(t, address, "x", func(dst map[replica.ID]index.Load) {
			dst[indextest.ID(1)] = index.Load{PrefillTokens: 100, Prefills: i + 1, Requests: 3, Began: began.Add(ago)}
			dst[indextest.ID(2)] = index.Load{Requests: 1}
		})
	}
	eventually(t, "sum of both", func() bool {
		l := seer.Others(indextest.ID(1))
		late := l.Began.Sub(began.Add(30 * time.Minute))
		return l.PrefillTokens == 200 && l.Prefills == 3 && l.Requests == 6 && late > -time.Minute && late < time.Minute
	})
	if l := seer.Others(indextest.ID(2)); !l.Began.IsZero() {
		t.Errorf("a replica without prefills began with one at %v", l.Began)
	}
}

func TestLoadShare(t *testing.T) {
	t.Parallel()
	server := testenv.StartRedis(t)
	address := "redis://" + server.Addr
	// Two gateways with one name by mistake are two gateways all the same.
	a, b, c := newSharer(t, address, "x"), newSharer(t, address, "x"), newSharer(t, address, "y")
	a.tokens.Store(100)
	b.tokens.Store(2000)
	sees := func(s *sharer, tokens int64) func() bool {
		return func() bool {
			return s.Others(indextest.ID(1)) == index.Load{PrefillTokens: tokens, Requests: int(tokens / 10)} &&
				s.Others(indextest.ID(2)) == index.Load{}
		}
	}
	eventually(t, "sum of two others", sees(c, 2100))
	eventually(t, "the other's load without the own", sees(a, 2000))
	a.tokens.Store(500)
	eventually(t, "change", sees(c, 2500))
	a.tokens.Store(0)
	eventually(t, "end of the requests", sees(c, 2000))

	// One exchange of three commands each interval, whatever happens.
	ticks, commands := c.ticks.Load(), c.hook.commands.Load()
	eventually(t, "ticks", func() bool { return c.ticks.Load() > ticks+10 })
	if n, most := c.hook.commands.Load()-commands, 3*(c.ticks.Load()-ticks+1); n > most {
		t.Errorf("%d commands in %d intervals", n, most/3)
	}

	// Somebody else's fields are not load.
	client := open(t, address)
	for field, v := range map[string]string{"junk": "not a share", "short": "\x01abc", "empty": "", "huge": "\x0112345678\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x01"} {
		client.HSet(t.Context(), "pg1:load", field, v)
	}
	ticks = c.ticks.Load()
	eventually(t, "ticks", func() bool { return c.ticks.Load() > ticks+5 })
	if !sees(c, 2000)() {
		t.Errorf("with junk in the hash Others = %+v, want 2000 tokens", c.Others(indextest.ID(1)))
	}
	client.Del(t.Context(), "pg1:load")
	client.Set(t.Context(), "pg1:load", "a string", 0)
	eventually(t, "recovery from a wrong type", func() bool { return client.Type(t.Context(), "pg1:load").Val() == "hash" && sees(c, 2000)() })

	// A gateway that ends takes its share along.
	d := newSharer(t, address, "z")
	d.tokens.Store(30)
	eventually(t, "a third's load", sees(c, 2030))
	d.kill()
	eventually(t, "its end", sees(c, 2000))

	// One that dies does not; its share fades. A frozen Redis makes all of them silent, and each forgets the others.
	server.Freeze()
	eventually(t, "fading", func() bool { return c.Others(indextest.ID(1)) == index.Load{} })
	server.Thaw()
	eventually(t, "return", sees(c, 2000))
	server.Kill()
	eventually(t, "fading", func() bool { return c.Others(indextest.ID(1)) == index.Load{} })
	server.Restart()
	eventually(t, "return", sees(c, 2000))
	if n := c.logs.lines(); n > 4 {
		t.Errorf("two outages logged %d lines:\n%s", n, c.logs)
	}
	if ttl := client.PTTL(t.Context(), "pg1:load").Val(); ttl <= 0 {
		t.Errorf("the hash has a TTL of %v", ttl)
	}
}

// A dead gateway's field stays for a while; a gateway that starts then must not count it for longer than the TTL.
func TestLoadOfADeadGatewayFades(t *testing.T) {
	t.Parallel()
	address := "redis://" + testenv.Redis(t)
	client := open(t, address)
	a := newSharer(t, address, "a")
	a.tokens.Store(70)
	var field, value string
	eventually(t, "share", func() bool {
		for f, v := range client.HGetAll(t.Context(), "pg1:load").Val() {
			field, value = f, v
		}
		return len(value) > 8
	})
	a.kill()
	// As if it had been killed: its last words are still there.
	client.HSet(t.Context(), "pg1:load", field, value)
	b := newSharer(t, address, "b")
	eventually(t, "last words", func() bool { return b.Others(indextest.ID(1)).PrefillTokens == 70 })
	eventually(t, "fading", func() bool { return b.Others(indextest.ID(1)) == index.Load{} })
}

func TestLoadShareOnACluster(t *testing.T) {
	t.Parallel()
	c := testenv.StartCluster(t)
	address := "redis-cluster://" + c.Addrs()[0]
	a, b := newSharer(t, address, "a"), newSharer(t, address, "b")
	a.tokens.Store(10)
	eventually(t, "share", func() bool { return b.Others(indextest.ID(1)).PrefillTokens == 10 })
}

func TestOthersAllocatesNothing(t *testing.T) {
	s := index.NewLoadShare(open(t, "redis://127.0.0.1:1"), "g", index.LoadOptions{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	id := indextest.ID(1)
	if n := testing.AllocsPerRun(100, func() { s.Others(id) }); n != 0 {
		t.Errorf("Others allocates %v times, want 0", n)
	}
}
