package replica

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// engine is a fake engine whose answers a test changes at will.
type engine struct {
	*httptest.Server
	health  atomic.Int32
	metrics atomic.Pointer[string]
	models  atomic.Pointer[string]
	slow    atomic.Pointer[func(w http.ResponseWriter, r *http.Request)] // Answers instead, if set.
	polled  chan string                                                  // Paths as they are asked for; nobody need read.
	auth    atomic.Pointer[string]
}

const plainMetrics = `# HELP x y
vllm:num_requests_running{engine="0",model_name="m"} %d
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",engine="0"} 1.0
vllm:prompt_tokens_total{engine="0"} 0
vllm:prompt_tokens_cached_total{engine="0"} 0
vllm:generation_tokens_total{engine="0"} 0
process_start_time_seconds %s
`

func (e *engine) set(running int, start string) {
	e.metrics.Store(new(fmt.Sprintf(plainMetrics, running, start)))
}

func newEngine(t *testing.T) *engine {
	t.Helper()
	e := &engine{polled: make(chan string, 1000)}
	e.health.Store(200)
	e.set(2, "1.79608844762e+09")
	e.models.Store(new(`{"object":"list","data":[{"id":"m","root":"r","parent":null,"max_model_len":4096},{"id":"lora-a","parent":"m","root":"/l"}]}`))
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.auth.Store(new(r.Header.Get("Authorization")))
		if f := e.slow.Load(); f != nil {
			(*f)(w, r)
		} else {
			switch r.URL.Path {
			case "/health":
				w.WriteHeader(int(e.health.Load()))
			case "/metrics":
				io.WriteString(w, *e.metrics.Load())
			case "/v1/models":
				io.WriteString(w, *e.models.Load())
			default:
				w.WriteHeader(http.StatusNotFound)
			}
		}
		select {
		case e.polled <- r.URL.Path:
		default:
		}
	}))
	t.Cleanup(e.Close)
	return e
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
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

func fastOptions(addrs ...string) Options {
	o := Options{Interval: 5 * time.Millisecond, Timeout: 2 * time.Second, ModelsInterval: 5 * time.Millisecond, EjectMin: 5 * time.Millisecond, EjectMax: 20 * time.Millisecond}
	for _, a := range addrs {
		o.Replicas = append(o.Replicas, Target{URL: a})
	}
	return o
}

// newFleet makes a fleet and, if run, runs it until the test ends.
func newFleet(t *testing.T, opts Options, run bool) (*Fleet, *prometheus.Registry, *logBuffer) {
	t.Helper()
	logs := &logBuffer{}
	reg := prometheus.NewRegistry()
	f, err := New(opts, slog.New(slog.NewTextHandler(logs, nil)), reg)
	if err != nil {
		t.Fatalf("New = %v", err)
	}
	if run {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.Run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("Run = %v", err)
			}
		})
	}
	return f, reg, logs
}

// until waits for a condition on the snapshot of replica i.
func until(t *testing.T, f *Fleet, i int, what string, ok func(Snapshot) bool) Snapshot {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		s := f.AppendSnapshots(nil)[i]
		if ok(s) {
			return s
		}
		if time.Now().After(deadline) {
			t.Fatalf("replica %d never was %s; it is %+v", i, what, s)
		}
		time.Sleep(time.Millisecond)
	}
}

func healthy(s Snapshot) bool { return s.Healthy }

func TestFleetReadsWhatEnginesTell(t *testing.T) {
	e := newEngine(t)
	opts := fastOptions(e.URL)
	opts.APIKeyFile = t.TempDir() + "/key"
	os.WriteFile(opts.APIKeyFile, []byte("k1\n"), 0o600)
	f, _, logs := newFleet(t, opts, true)
	if err := f.WaitProbed(t.Context()); err != nil {
		t.Fatalf("WaitProbed = %v", err)
	}
	s := until(t, f, 0, "complete", func(s Snapshot) bool { return s.Healthy && s.MetricsFresh && len(s.Models) == 2 })
	if s.ID != (ID{e.URL, 1796088447620000}) || s.Running != 2 || s.Waiting != 1 || s.KVUsage != 0.25 || s.BlockTokens != 16 || s.NumBlocks != 1000 || s.Weight != 1 {
		t.Errorf("Snapshot = %+v, want what the engine tells", s)
	}
	if m := s.Models; m[0].ID != "m" || m[0].MaxModelLen != 4096 || m[1].Parent != "m" || !strings.Contains(string(m[0].Raw), `"root":"r"`) {
		t.Errorf("Models = %+v, want both with their metadata", m)
	}
	if got := *e.auth.Load(); got != "Bearer k1" {
		t.Errorf("Authorization of a poll = %q, want the key", got)
	}
	if strings.Contains(logs.String(), "k1") {
		t.Error("the key is in the log")
	}
}

// Elsewhere any HTTP reply counted as healthy, redirects to a healthy one too.
func TestOnly2xxIsHealthy(t *testing.T) {
	good := newEngine(t)
	for _, status := range []int{503, 404, 301, 500, 401} {
		e := newEngine(t)
		e.slow.Store(new(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Location", good.URL+"/health")
			w.WriteHeader(status)
		}))
		f, _, _ := newFleet(t, fastOptions(e.URL), true)
		for range 5 {
			<-e.polled
		}
		if s := f.AppendSnapshots(nil)[0]; s.Healthy {
			t.Errorf("status %d is healthy", status)
		}
		e.slow.Store(nil)
		until(t, f, 0, "healthy", healthy)
		e.health.Store(int32(status))
		until(t, f, 0, "unhealthy", func(s Snapshot) bool { return !s.Healthy })
	}
	slow := newEngine(t)
	release := make(chan struct{})
	slow.slow.Store(new(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		<-release
	}))
	f, _, _ := newFleet(t, fastOptions(slow.URL), true)
	until(t, f, 0, "healthy with a slow body", healthy)
	close(release)
}

// A late answer of the health path is no reason to move every conversation elsewhere; a refused connection is.
func TestSilenceIsForgivenForAWhile(t *testing.T) {
	f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}}, false)
	in := f.members.Load().list[0]
	now := time.Now()
	step := func(v verdict, want bool) {
		t.Helper()
		now = now.Add(time.Second)
		in.judge(now.Add(-time.Millisecond), now, v, "test")
		if got := f.AppendSnapshots(nil)[0].Healthy; got != want {
			t.Errorf("Healthy after verdict %d = %v, want %v", v, got, want)
		}
	}
	if f.AppendSnapshots(nil)[0].Healthy {
		t.Error("Healthy before any poll")
	}
	step(verdictSilent, false)
	step(verdictWell, true)
	step(verdictSilent, true)
	step(verdictSilent, true)
	step(verdictWell, true)
	step(verdictSilent, true)
	step(verdictSilent, true)
	step(verdictSilent, false)
	step(verdictWell, true)
	step(verdictIll, false)
	step(verdictWell, true)
	// Elsewhere a pool of busy engines was declared dead because their health paths were slow.
	for range 20 {
		in.succeeded(now.Add(time.Second))
		step(verdictSilent, true)
	}
}

// Elsewhere all metrics stale meant the pool was full. Here they only stop counting, and the log says so once.
func TestStaleMetricsOnlyStopCounting(t *testing.T) {
	e := newEngine(t)
	opts := fastOptions(e.URL)
	opts.StaleAfter = 30 * time.Millisecond
	f, reg, logs := newFleet(t, opts, true)
	until(t, f, 0, "fresh", func(s Snapshot) bool { return s.Healthy && s.MetricsFresh })
	e.slow.Store(new(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			w.WriteHeader(http.StatusInternalServerError)
		}
	}))
	s := until(t, f, 0, "stale", func(s Snapshot) bool { return !s.MetricsFresh })
	if !s.Healthy {
		t.Error("a replica with stale metrics is not healthy")
	}
	for strings.Count(logs.String(), "metrics are stale") == 0 {
		<-e.polled
	}
	for range 20 {
		<-e.polled
	}
	if n := strings.Count(logs.String(), "metrics are stale"); n != 1 {
		t.Errorf("logged %d times that metrics are stale, want once:\n%s", n, logs)
	}
	if n, _ := testutil.GatherAndCount(reg, "prefixgate_replica_metrics_fresh"); n != 1 {
		t.Errorf("metrics_fresh has %d series, want 1", n)
	}
	e.slow.Store(nil)
	until(t, f, 0, "fresh again", func(s Snapshot) bool { return s.MetricsFresh })
}

// Elsewhere one hanging metrics endpoint starved the rest, and an endless one filled the memory.
func TestOneBadEndpointDoesNotHurtTheOthers(t *testing.T) {
	release := make(chan struct{})
	hang, endless, good := newEngine(t), newEngine(t), newEngine(t)
	hang.slow.Store(new(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
	}))
	var sent atomic.Int64
	endless.slow.Store(new(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			return
		}
		line := bytes.Repeat([]byte("# filler line that says nothing\n"), 1000)
		for r.Context().Err() == nil {
			n, err := w.Write(line)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	}))
	opts := fastOptions(hang.URL, endless.URL, good.URL)
	opts.MaxScrapeBytes = 1 << 20
	opts.StaleAfter = 10 * time.Second
	f, _, _ := newFleet(t, opts, true)
	until(t, f, 2, "fresh", func(s Snapshot) bool { return s.MetricsFresh })
	until(t, f, 0, "healthy", healthy)
	until(t, f, 1, "healthy", healthy)
	before := runtime.NumGoroutine()
	good.set(7, "1.79608844762e+09")
	until(t, f, 2, "read again", func(s Snapshot) bool { return s.Running == 7 })
	for range 200 {
		<-good.polled
	}
	if after := runtime.NumGoroutine(); after > before+20 {
		t.Errorf("goroutines grew from %d to %d", before, after)
	}
	if s := f.AppendSnapshots(nil); s[0].MetricsFresh || s[1].MetricsFresh {
		t.Errorf("hanging and endless metrics count as fresh: %+v", s[:2])
	}
	close(release)
}

// Elsewhere counters went negative or leaked when a replica came and went while requests ran.
func TestLeasesEndOnTheirOwnInstance(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}}, false)
	for range 100 {
		var wg sync.WaitGroup
		old := f.members.Load().list[0]
		for range 50 {
			l, ok := f.Acquire("http://a:1", rng.IntN(1000))
			if !ok {
				t.Fatal("Acquire of a configured replica = false")
			}
			first, twice := rng.IntN(2) == 0, rng.IntN(2) == 0
			wg.Go(func() {
				if first {
					l.FirstToken(time.Second)
				}
				l.Release()
				if twice {
					l.Release()
					l.FirstToken(time.Second)
				}
				l.Failed(FailureConnect)
			})
		}
		f.SetReplicas(nil)
		if _, ok := f.Acquire("http://a:1", 1); ok {
			t.Fatal("Acquire of a removed replica = true")
		}
		f.SetReplicas([]Target{{URL: "http://A:1/"}})
		wg.Wait()
		if n, p, q := old.inFlight.Load(), old.prefillTokens, old.prompts; n != 0 || p != 0 || q != 0 {
			t.Fatalf("old instance has %d in flight, %d prefill tokens, %d waiting; want none", n, p, q)
		}
		in := f.members.Load().list[0]
		in.judge(time.Now(), time.Now(), verdictWell, "test")
		if s := f.AppendSnapshots(nil)[0]; s.InFlight != 0 || s.PrefillTokens != 0 || !s.Healthy {
			t.Fatalf("new instance = %+v, want untouched by the old one's requests", s)
		}
	}
}

func TestAcquireCountsAtDispatch(t *testing.T) {
	f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}}, false)
	one, _ := f.Acquire("http://a:1", 100)
	two, _ := f.Acquire("http://a:1", 50)
	check := func(inFlight int, tokens int64) {
		t.Helper()
		if s := f.AppendSnapshots(nil)[0]; s.InFlight != inFlight || s.PrefillTokens != tokens {
			t.Errorf("in flight %d, prefill tokens %d; want %d, %d", s.InFlight, s.PrefillTokens, inFlight, tokens)
		}
	}
	check(2, 150)
	one.FirstToken(time.Millisecond)
	check(2, 50)
	one.FirstToken(time.Millisecond)
	check(2, 50)
	two.Release()
	check(1, 0)
	one.Release()
	check(0, 0)
}

// How long the replica has been at the first prompt in its queue is told by when that was sent, or by the last first token.
func TestPrefillBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}}, false)
		start := time.Now()
		check := func(tokens int64, prefills int, began time.Duration) {
			t.Helper()
			s := f.AppendSnapshots(nil)[0]
			if s.PrefillTokens != tokens || s.Prefills != prefills || s.PrefillBegan.Sub(start) != began {
				t.Errorf("%d tokens of %d prompts since %v, want %d of %d since %v",
					s.PrefillTokens, s.Prefills, s.PrefillBegan.Sub(start), tokens, prefills, began)
			}
		}
		if s := f.AppendSnapshots(nil)[0]; !s.PrefillBegan.IsZero() {
			t.Errorf("PrefillBegan = %v before anything was sent", s.PrefillBegan)
		}
		time.Sleep(time.Second)
		first, _ := f.Acquire("http://a:1", 1000)
		time.Sleep(time.Second)
		second, _ := f.Acquire("http://a:1", 300)
		third, _ := f.Acquire("http://a:1", 200)
		check(1500, 3, time.Second)
		time.Sleep(time.Second)
		first.FirstToken(0)
		check(500, 2, 3*time.Second)
		time.Sleep(time.Second)
		third.Release() // A client that left from the middle of the queue: nothing is known to have begun.
		check(300, 1, 3*time.Second)
		second.Release()
		check(0, 0, 3*time.Second)
		time.Sleep(time.Hour)
		last, _ := f.Acquire("http://a:1", 100)
		check(100, 1, time.Hour+4*time.Second) // Idle time is not progress.
		last.Release()
		first.Release()
		check(0, 0, time.Hour+4*time.Second)
	})
}

// Elsewhere requests stuck to a replica that refused connections. Here the first one ejects it, and only an answer of the
// health path after a growing pause brings it back.
func TestConnectFailuresEjectWithBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, reg, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}, EjectMin: time.Second, EjectMax: 4 * time.Second}, false)
		in := f.members.Load().list[0]
		poll := func() bool {
			in.judge(time.Now(), time.Now(), verdictWell, "test")
			return f.AppendSnapshots(nil)[0].Healthy
		}
		if !poll() {
			t.Fatal("not healthy after a good poll")
		}
		for i, pause := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 4 * time.Second, 4 * time.Second} {
			for range 10 { // Many requests were under way; they count once.
				f.ReportFailure("http://a:1", FailureConnect)
			}
			if f.AppendSnapshots(nil)[0].Healthy || poll() {
				t.Fatalf("ejection %d: healthy at once", i)
			}
			time.Sleep(pause - time.Millisecond)
			if poll() {
				t.Fatalf("ejection %d: healthy before %v", i, pause)
			}
			time.Sleep(time.Millisecond)
			if f.AppendSnapshots(nil)[0].Healthy {
				t.Fatalf("ejection %d: healthy without a poll", i)
			}
			if !poll() {
				t.Fatalf("ejection %d: not healthy after %v and a good poll", i, pause)
			}
		}
		f.ReportSuccess("http://a:1")
		f.ReportFailure("http://a:1", FailureConnect)
		time.Sleep(time.Second)
		if !poll() {
			t.Error("a success did not reset the pause")
		}
		want := "# HELP prefixgate_replica_ejections_total Ejections of the replica by cause.\n# TYPE prefixgate_replica_ejections_total counter\n"
		for kind, n := range map[FailureKind]int{FailureConnect: 6, FailureFirstByte: 0, FailureReset: 0, failureStall: 0} {
			want += fmt.Sprintf("prefixgate_replica_ejections_total{kind=%q,replica=\"http://a:1\"} %d\n", kind, n)
		}
		if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "prefixgate_replica_ejections_total"); err != nil {
			t.Error(err)
		}
	})
}

// Elsewhere an engine that answered its health path and no request stayed in rotation for an hour.
func TestSoftFailuresEjectAndReturnOnTrial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}, EjectMin: time.Second}, false)
		in := f.members.Load().list[0]
		poll := func() bool {
			in.judge(time.Now(), time.Now(), verdictWell, "test")
			return f.AppendSnapshots(nil)[0].Healthy
		}
		poll()
		f.ReportFailure("http://a:1", FailureFirstByte)
		f.ReportFailure("http://a:1", FailureReset)
		f.ReportSuccess("http://a:1")
		f.ReportFailure("http://a:1", FailureFirstByte)
		f.ReportFailure("http://a:1", FailureFirstByte)
		if !poll() {
			t.Fatal("ejected before three failures in a row")
		}
		f.ReportFailure("http://a:1", FailureFirstByte)
		if poll() {
			t.Fatal("not ejected after three failures in a row")
		}
		time.Sleep(time.Second)
		if !poll() {
			t.Fatal("not back after the pause")
		}
		trial, _ := f.Acquire("http://a:1", 1)
		if poll() {
			t.Fatal("a second request may go to a replica on trial")
		}
		trial.Failed(FailureFirstByte)
		trial.Release()
		if poll() {
			t.Fatal("not ejected by a failed trial")
		}
		time.Sleep(time.Second)
		if poll() {
			t.Fatal("the second pause is not longer")
		}
		time.Sleep(time.Second)
		if !poll() {
			t.Fatal("not back after the second pause")
		}
		trial, _ = f.Acquire("http://a:1", 1)
		trial.Succeeded()
		if !poll() {
			t.Fatal("not healthy after a trial that succeeded")
		}
		trial.Release()
		if in.trials != 0 {
			t.Errorf("%d trials left, want 0", in.trials)
		}
	})
}

func TestStandstillEjects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}, StallAfter: 10 * time.Second}, false)
		in := f.members.Load().list[0]
		in.judge(time.Now(), time.Now(), verdictWell, "test")
		steps := 7.0
		scrape := func(running, prompt float64) bool {
			time.Sleep(time.Second)
			in.judge(time.Now(), time.Now(), verdictWell, "test")
			in.scraped(time.Now(), sample{running: running, prompt: prompt, generated: 0, steps: steps, start: 1}, nil)
			return f.AppendSnapshots(nil)[0].Healthy
		}
		for i := range 30 {
			if !scrape(2, float64(i)) {
				t.Fatal("ejected although it makes progress")
			}
		}
		for range 30 {
			if !scrape(0, 29) {
				t.Fatal("ejected although it is idle")
			}
		}
		for range 9 {
			if !scrape(2, 29) {
				t.Fatal("ejected too early")
			}
		}
		for range 2 {
			if scrape(2, 29) {
				t.Fatal("not ejected at a standstill")
			}
		}
		time.Sleep(time.Hour)
		if scrape(2, 29) {
			t.Fatal("back although it still stands")
		}
		if !scrape(2, 30) {
			t.Fatal("not back although it moves")
		}
		// An engine that does not count its steps may be at a long prefill.
		steps = math.NaN()
		scrape(2, 30)
		for range 48 {
			if !scrape(2, 30) {
				t.Fatal("ejected in the middle of a long prefill")
			}
		}
		time.Sleep(10 * time.Second)
		if scrape(2, 30) {
			t.Fatal("not ejected after five times the limit")
		}
	})
}

// Elsewhere a restarted replica was credited with blocks it had lost.
func TestRestartIsAnotherID(t *testing.T) {
	e := newEngine(t)
	f, reg, _ := newFleet(t, fastOptions(e.URL), false)
	gone := make(chan ID, 10)
	f.OnGone(func(id ID) { gone <- id })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	first := ID{e.URL, 1796088447620000}
	until(t, f, 0, "known", func(s Snapshot) bool { return s.ID == first })
	if got := <-gone; got != (ID{e.URL, 0}) {
		t.Errorf("gone = %v, want the ID without a start", got)
	}
	e.set(0, "1.79608844863e+09")
	second := ID{e.URL, 1796088448630000}
	until(t, f, 0, "restarted", func(s Snapshot) bool { return s.ID == second })
	if got := <-gone; got != first {
		t.Errorf("gone = %v, want %v", got, first)
	}
	if got := testutil.CollectAndCount(newCollector(f), "prefixgate_replica_restarts_total"); got != 1 {
		t.Errorf("restarts_total has %d series, want 1", got)
	}
	if f.members.Load().list[0].restarts.Load() != 1 {
		t.Errorf("restarts = %d, want 1", f.members.Load().list[0].restarts.Load())
	}
	// Elsewhere the series of removed replicas stayed for ever.
	f.SetReplicas(nil)
	if got := <-gone; got != second {
		t.Errorf("gone = %v, want %v", got, second)
	}
	if n, err := testutil.GatherAndCount(reg, "prefixgate_replica_healthy", "prefixgate_replica_in_flight_requests", "prefixgate_replica_restarts_total"); n != 0 || err != nil {
		t.Errorf("%d series of a removed replica (%v), want none", n, err)
	}
	f.SetReplicas([]Target{{URL: e.URL}})
	until(t, f, 0, "healthy after it came back", healthy)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v", err)
	}
}

// A replica that came back with another model used to be sent requests for its former one until the next regular reading.
func TestRestartReadsModelsAnew(t *testing.T) {
	e := newEngine(t)
	opts := fastOptions(e.URL)
	opts.ModelsInterval = time.Hour
	f, _, _ := newFleet(t, opts, true)
	until(t, f, 0, "known", func(s Snapshot) bool { return len(s.Models) == 2 && s.ID.Start != 0 })
	e.models.Store(new(`{"object":"list","data":[{"id":"other"}]}`))
	e.set(0, "1.79608844863e+09")
	until(t, f, 0, "known by its other model", func(s Snapshot) bool { return len(s.Models) == 1 && s.Models[0].ID == "other" })
}

func TestHiddenStartShowsByCounters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, _, _ := newFleet(t, Options{Replicas: []Target{{URL: "http://a:1"}}}, false)
		in := f.members.Load().list[0]
		in.scraped(time.Now(), sample{start: math.NaN(), prompt: 100, generated: 5}, nil)
		time.Sleep(time.Second)
		in.scraped(time.Now(), sample{start: math.NaN(), prompt: 200, generated: 5}, nil)
		if id := f.AppendSnapshots(nil)[0].ID; id.Start != 0 {
			t.Errorf("ID = %v, want no start", id)
		}
		in.scraped(time.Now(), sample{start: math.NaN(), prompt: 10, generated: 0}, nil)
		if id := f.AppendSnapshots(nil)[0].ID; id.Start == 0 {
			t.Error("a restart that the counters show gave no new ID")
		}
	})
}

// Elsewhere a reload left goroutines behind.
func TestSetReplicasLeavesNothingBehind(t *testing.T) {
	engines := []*engine{newEngine(t), newEngine(t), newEngine(t)}
	f, _, _ := newFleet(t, fastOptions(engines[0].URL), true)
	until(t, f, 0, "healthy", healthy)
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			var snaps []Snapshot
			for range 50 {
				var list []Target
				for _, e := range engines {
					if rng.IntN(2) == 0 {
						list = append(list, Target{URL: e.URL, Weight: rng.Float64()})
					}
				}
				if err := f.SetReplicas(list); err != nil {
					t.Errorf("SetReplicas = %v", err)
				}
				snaps = f.AppendSnapshots(snaps[:0])
				if l, ok := f.Acquire(engines[0].URL, 5); ok {
					l.Release()
				}
			}
		})
	}
	wg.Wait()
	f.SetReplicas([]Target{{URL: engines[0].URL}})
	until(t, f, 0, "healthy", healthy)
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before+12 { // Idle connections of three servers.
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
		time.Sleep(time.Millisecond)
	}
	if err := f.SetReplicas([]Target{{URL: "nonsense"}}); err == nil || f.Len() != 1 {
		t.Errorf("SetReplicas of a wrong list = %v, %d replicas; want an error and the old list", err, f.Len())
	}
	if !f.SetDraining(engines[0].URL, true) || !f.AppendSnapshots(nil)[0].Draining || f.SetDraining("http://nobody:1", true) {
		t.Error("SetDraining does not do what it says")
	}
}

func TestRefusedConnectionIsUnhealthyAtOnce(t *testing.T) {
	e := newEngine(t)
	f, _, logs := newFleet(t, fastOptions(e.URL), true)
	until(t, f, 0, "healthy", healthy)
	e.CloseClientConnections()
	e.Listener.Close()
	until(t, f, 0, "unhealthy", func(s Snapshot) bool { return !s.Healthy })
	if n := strings.Count(logs.String(), "replica is not healthy"); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
}

func TestSnapshotsAllocateNothing(t *testing.T) {
	var targets []Target
	for i := range 64 {
		targets = append(targets, Target{URL: fmt.Sprintf("http://10.0.0.%d:8000", i)})
	}
	f, _, _ := newFleet(t, Options{Replicas: targets}, false)
	dst := f.AppendSnapshots(nil)
	if n := testing.AllocsPerRun(100, func() { dst = f.AppendSnapshots(dst[:0]) }); n != 0 {
		t.Errorf("AppendSnapshots allocates %v times, want 0", n)
	}
}

func BenchmarkSnapshots(b *testing.B) {
	for _, n := range []int{2, 16, 128} {
		var targets []Target
		for i := range n {
			targets = append(targets, Target{URL: fmt.Sprintf("http://10.0.0.%d:8000", i)})
		}
		f, err := New(Options{Replicas: targets}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			dst := f.AppendSnapshots(nil)
			for b.Loop() {
				dst = f.AppendSnapshots(dst[:0])
			}
		})
	}
}

func TestValidate(t *testing.T) {
	for _, c := range []struct {
		opts Options
		want []string
	}{
		{Options{}, nil},
		{Options{Replicas: []Target{{URL: "http://a"}, {URL: "https://[::1]:8443/"}}}, nil},
		{Options{Replicas: []Target{{URL: "a:8000"}, {URL: "http://u:secret@a"}, {URL: "http://a/v1"}, {URL: "http://a"}, {URL: "http://A:80/"}, {URL: "http://a:99999"}, {URL: "http://"}, {URL: "http://b", Weight: -1}}}, []string{
			"replicas[0].url", "replicas[1].url", "replicas[2].url", "replicas[4].url: http://a:80 is already replicas[3]", "replicas[5].url", "replicas[6].url", "replicas[7].weight",
		}},
		{Options{HealthPath: "health", Interval: -1, EjectMin: time.Minute, EjectMax: time.Second, UnhealthyAfter: -1, SoftFailures: -1, MaxScrapeBytes: -1}, []string{
			"health_path", "interval", "eject_max", "unhealthy_after", "soft_failures", "max_scrape_bytes",
		}},
	} {
		err := c.opts.Validate()
		if len(c.want) == 0 {
			if err != nil {
				t.Errorf("Validate(%+v) = %v, want nil", c.opts, err)
			}
			continue
		}
		if err == nil {
			t.Errorf("Validate(%+v) = nil, want errors", c.opts)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		if len(lines) != len(c.want) {
			t.Errorf("Validate has %d problems, want %d:\n%v", len(lines), len(c.want), err)
			continue
		}
		for i, w := range c.want {
			if !strings.HasPrefix(lines[i], w) {
				t.Errorf("problem %d = %q, want it to start with %q", i, lines[i], w)
			}
		}
		if strings.Contains(err.Error(), "secret") {
			t.Errorf("Validate repeats a password: %v", err)
		}
	}
}

func TestCanonicalAddr(t *testing.T) {
	for in, want := range map[string]string{
		"http://a": "http://a:80", "HTTPS://Host": "https://host:443", "http://10.0.0.1:8000/": "http://10.0.0.1:8000", "http://[::1]:1": "http://[::1]:1",
	} {
		if got, err := CanonicalAddr(in); err != nil || got != want {
			t.Errorf("CanonicalAddr(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestUnreachableAddressNeverIsHealthy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := "http://" + l.Addr().String()
	l.Close()
	f, _, _ := newFleet(t, fastOptions(addr), true)
	if err := f.WaitProbed(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := f.AppendSnapshots(nil)[0]; s.Healthy || s.MetricsFresh || !math.IsNaN(s.KVUsage) {
		t.Errorf("Snapshot = %+v, want unknown and not healthy", s)
	}
}
