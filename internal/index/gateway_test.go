package index_test

import (
	"bytes"
	"context"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/index/indextest"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"
)

// hook counts what a client does.
type hook struct {
	dials, trips, commands atomic.Int64
	mu                     sync.Mutex
	names                  map[string]int // commands by name; guarded by mu
}

func (h *hook) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		h.dials.Add(1)
		return next(ctx, network, addr)
	}
}

func (h *hook) count(cmds ...redis.Cmder) {
	if slices.Contains([]string{"hello", "auth", "client", "select"}, cmds[0].Name()) {
		return // a new connection's handshake
	}
	h.trips.Add(1)
	h.commands.Add(int64(len(cmds)))
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range cmds {
		h.names[c.Name()]++
	}
}

func (h *hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		h.count(cmd)
		return next(ctx, cmd)
	}
}

func (h *hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.count(cmds...)
		return next(ctx, cmds)
	}
}

// logBuffer keeps what was logged.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) lines() int { return strings.Count(l.String(), "\n") }

// gateway is one gateway's index with all that a test wants to see of it.
type gateway struct {
	*index.Redis
	hook *hook
	logs *logBuffer
	reg  *prometheus.Registry
}

// newGateway returns a gateway with short intervals, so that outages of seconds are long ones, and with time enough for a
// lookup on a busy machine under the race detector.
func newGateway(tb testing.TB, address string, opts index.Options) *gateway {
	tb.Helper()
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&opts.LookupTimeout, 100*time.Millisecond)
	def(&opts.ProbeInterval, 50*time.Millisecond)
	def(&opts.PollInterval, 200*time.Millisecond)
	def(&opts.NearCacheStaleness, -1)
	g := &gateway{hook: &hook{names: make(map[string]int)}, logs: &logBuffer{}, reg: prometheus.NewRegistry()}
	client := open(tb, address)
	client.AddHook(g.hook)
	g.Redis = index.NewRedis(client, opts, slog.New(slog.NewTextHandler(g.logs, nil)), g.reg)
	tb.Cleanup(func() {
		if err := g.Close(); err != nil {
			tb.Errorf("Close: %v", err)
		}
	})
	return g
}

// metric returns the value of the gateway's metric whose labels, if any, are exactly the values given; summed over the rest.
func (g *gateway) metric(tb testing.TB, name string, labels ...string) float64 {
	tb.Helper()
	families, err := g.reg.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			ok := true
			for _, want := range labels {
				ok = ok && slices.ContainsFunc(m.GetLabel(), func(l *dto.LabelPair) bool { return l.GetValue() == want })
			}
			if ok {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// eventually waits for something that depends on other processes, and logs how long it took.
func eventually(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	start := time.Now()
	for !ok() {
		// Sentinels that find their clock jumping, as it seems to on a busy machine, do nothing for half a minute.
		if time.Since(start) > 2*time.Minute {
			tb.Fatalf("no %s after 2 minutes", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
	tb.Logf("%s after %v", what, time.Since(start).Round(time.Millisecond))
}

// shares reports whether what from records now is found by to. The chain is long enough to have runs on every master of
// a cluster.
func shares(tb testing.TB, rng *rand.Rand, from, to *gateway) bool {
	tb.Helper()
	c := indextest.Chain(rng, 4000)
	from.Record(indextest.ID(1), c)
	ctx, cancel := context.WithTimeout(tb.Context(), 5*time.Second)
	defer cancel()
	if from.Flush(ctx) != nil {
		return false
	}
	dst := make([]int, 2)
	return to.Match(tb.Context(), c, indextest.Holders(2), dst) == nil && dst[1] == len(c)
}

// traffic is load on gateways: conversations whose turns go to random gateways, and there to the replica that holds most.
type traffic struct {
	tb      testing.TB
	gws     []*gateway
	stop    chan struct{}
	wg      sync.WaitGroup
	lookups atomic.Int64
	errs    atomic.Int64
	longest atomic.Int64 // nanoseconds

	mu       sync.Mutex
	prompts  [][]block.Hash // guarded by mu
	replicas int
}

func startTraffic(tb testing.TB, gws ...*gateway) *traffic {
	tb.Helper()
	l := &traffic{tb: tb, gws: gws, stop: make(chan struct{}), replicas: 4}
	rng := rand.New(rand.NewPCG(11, 11))
	system := indextest.Chain(rng, 45)
	for range 24 {
		l.prompts = append(l.prompts, indextest.Fork(rng, system, len(system), 60))
	}
	for w := range 6 {
		l.wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 12))
			tick := time.NewTicker(3 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-l.stop:
					return
				case <-tick.C:
					l.turn(rng)
				}
			}
		})
	}
	tb.Cleanup(l.end)
	return l
}

// end stops the load and waits for it.
func (l *traffic) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.wg.Wait()
}

func (l *traffic) turn(rng *rand.Rand) {
	g := l.gws[rng.IntN(len(l.gws))]
	i := rng.IntN(len(l.prompts))
	l.mu.Lock()
	c := l.prompts[i]
	if len(c) > 400 {
		c = c[:60]
	}
	c = indextest.Fork(rng, c, len(c), len(c)+rng.IntN(8))
	l.prompts[i] = c
	l.mu.Unlock()
	dst := make([]int, l.replicas)
	start := time.Now()
	err := g.Match(context.Background(), c, indextest.Holders(l.replicas), dst)
	took := int64(time.Since(start))
	l.lookups.Add(1)
	if err != nil {
		l.errs.Add(1)
	}
	for old := l.longest.Load(); took > old && !l.longest.CompareAndSwap(old, took); old = l.longest.Load() {
		continue
	}
	best := rng.IntN(l.replicas)
	for r, n := range dst {
		if n < 0 || n > len(c) {
			l.tb.Errorf("Match(%d blocks) = %v", len(c), dst)
		}
		if n > dst[best] {
			best = r
		}
	}
	g.Record(indextest.ID(best), c)
}

// more waits for n more lookups.
func (l *traffic) more(n int64) {
	l.tb.Helper()
	want := l.lookups.Load() + n
	for end := time.Now().Add(60 * time.Second); l.lookups.Load() < want; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			l.tb.Fatalf("lookups hang: %d of %d after 60 s", l.lookups.Load(), want)
		}
	}
}

// settled touches every prompt through every gateway and checks that they then agree on all of them.
func (l *traffic) settled() {
	l.tb.Helper()
	l.end()
	// Two gateways that write one run in the same millisecond may undo each other's change until the next touch; nothing of
	// the load may still be on its way.
	for _, g := range l.gws {
		l.soon("Flush", func() error { return g.Flush(l.tb.Context()) })
	}
	holders := indextest.Holders(l.replicas)
	dst := make([]int, l.replicas)
	match := func(g *gateway, c []block.Hash) {
		l.soon("Match", func() error { return g.Match(l.tb.Context(), c, holders, dst) })
	}
	for _, g := range l.gws {
		for _, c := range l.prompts {
			match(g, c)
			// What this gateway alone knows, it tells.
			for r, n := range dst {
				if n > 0 {
					g.Record(indextest.ID(r), c[:n])
				}
			}
		}
		l.soon("Flush", func() error { return g.Flush(l.tb.Context()) })
	}
	want := make([]int, l.replicas)
	for i, c := range l.prompts {
		for k, g := range l.gws {
			match(g, c)
			if k == 0 {
				copy(want, dst)
			} else if !slices.Equal(dst, want) {
				l.tb.Errorf("prompt %d: gateway %d finds %v, gateway 0 %v", i, k, dst, want)
			}
		}
	}
}

// soon calls do until it succeeds. After a fault the client may go on for a second to return the last error of a dial without
// dialing, or have connections that are only now cut off; an answer that is wrong is never excused.
func (l *traffic) soon(what string, do func() error) {
	l.tb.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := do()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			l.tb.Fatalf("%s after the fault: %v", what, err)
		}
	}
}

// slowProxy passes bytes to and from a server, what the server says later by delay.
type slowProxy struct {
	l     net.Listener
	delay atomic.Int64 // nanoseconds
}

func (p *slowProxy) addr() string { return p.l.Addr().String() }

func newSlowProxy(tb testing.TB, to string) *slowProxy {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &slowProxy{l: l}
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", to)
			if err != nil {
				in.Close()
				continue
			}
			wg.Go(func() {
				<-done
				in.Close()
				out.Close()
			})
			wg.Go(func() { p.pass(out, in, nil) })
			wg.Go(func() { p.pass(in, out, &p.delay) })
		}
	})
	tb.Cleanup(func() {
		l.Close()
		close(done)
		wg.Wait()
	})
	return p
}

func (p *slowProxy) pass(dst, src net.Conn, delay *atomic.Int64) {
	defer dst.Close()
	defer src.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if delay != nil {
				time.Sleep(time.Duration(delay.Load()))
			}
			if _, err := dst.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
