package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/config"
	"prefixgate/internal/replica"
	"prefixgate/internal/sim"
	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"

	"go.uber.org/goleak"
)

const demoModel = "prefixgate-demo"

func demoDir() string { return filepath.Join(testenv.Root(), "models", demoModel) }

// demoTokenizer is the tokenizer of the simulated replicas: one for all tests, since loading takes a second under the race
// detector. It lives as long as the process.
var demoTokenizer = sync.OnceValues(func() (*tokenize.Model, error) {
	return tokenize.Load(context.Background(), tokenize.Options{
		Model: demoDir(), Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 2, CacheBytes: 8 << 20,
	}, slog.New(slog.DiscardHandler), nil)
})

// startReplica starts a simulated replica; change may set what is special about it.
func startReplica(tb testing.TB, change func(*simhttp.Options)) *simhttp.Server {
	tb.Helper()
	m, err := demoTokenizer()
	if err != nil {
		tb.Fatalf("load the demo's tokenizer: %v", err)
	}
	opts := simhttp.Options{
		Tokenizer:    m,
		Engine:       sim.Options{PrefillRate: math.Inf(1), DecodeRate: math.Inf(1)},
		AnswerTokens: 20,
	}
	if change != nil {
		change(&opts)
	}
	s, err := simhttp.New(tb.Context(), opts)
	if err != nil {
		tb.Fatalf("start a simulated replica: %v", err)
	}
	tb.Cleanup(func() { s.Close() })
	return s
}

// syncBuffer is a log that may be read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// running is a gateway under test.
type running struct {
	*Gateway
	URL    string
	tb     testing.TB
	log    *syncBuffer
	access *syncBuffer
	stop   context.CancelFunc
	done   chan error
	once   sync.Once
}

// testConfig is the configuration of a gateway before the given replicas.
func testConfig(urls ...string) *config.Config {
	c := &config.Config{
		Server: config.Server{Listen: "127.0.0.1:0", DebugHeaders: true, DrainDelay: -1, DrainTimeout: 5 * time.Second},
		Models: []config.Model{{Tokenizer: tokenize.Options{Model: demoDir(), Workers: 2, CacheBytes: 8 << 20, Timeout: 5 * time.Second}}},
		Fleet:  replica.Options{Interval: 50 * time.Millisecond, Timeout: 2 * time.Second, EjectMin: 50 * time.Millisecond},
	}
	c.Index.LookupTimeout = 100 * time.Millisecond // the race detector and a busy machine
	c.Proxy.DialTimeout = 10 * time.Second         // the same
	c.Route.ProbeEvery = -1                        // no chance in tests
	for _, u := range urls {
		c.Fleet.Replicas = append(c.Fleet.Replicas, replica.Target{URL: u})
	}
	return c
}

// start runs a gateway until the test ends, and waits until it is ready and has seen every healthy replica's models.
func start(tb testing.TB, c *config.Config) *running {
	tb.Helper()
	r := startWith(tb, c, nil)
	r.awaitReady()
	return r
}

// startWith runs a gateway until the test ends; change may set what is special about it.
func startWith(tb testing.TB, c *config.Config, change func(*Options)) *running {
	tb.Helper()
	r := &running{tb: tb, log: &syncBuffer{}, access: &syncBuffer{}, done: make(chan error, 1)}
	opts := Options{
		Config:  c,
		Log:     slog.New(slog.NewJSONHandler(r.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Access:  slog.New(slog.NewJSONHandler(r.access, nil)),
		Version: "test",
		Getenv:  func(string) string { return "" },
	}
	if change != nil {
		change(&opts)
	}
	g, err := New(opts)
	if err != nil {
		tb.Fatalf("New: %v", err)
	}
	r.Gateway, r.URL = g, "http://"+g.Addr()
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() { r.done <- g.Run(ctx) }()
	tb.Cleanup(func() { r.end() })
	return r
}

// end stops the gateway as a signal does and waits for it.
func (r *running) end() {
	r.once.Do(func() {
		r.stop()
		if err := <-r.done; err != nil {
			r.tb.Errorf("Run = %v, want no error", err)
		}
		if r.tb.Failed() {
			r.tb.Logf("log:\n%s", r.log)
			r.tb.Logf("access:\n%s", r.access)
		}
	})
}

// awaitReady waits until requests are routed with all that is to be known: readiness, and each replica's models and start.
func (r *running) awaitReady() {
	r.tb.Helper()
	r.eventually("gateway is ready", func() bool {
		if r.notReady() != "" {
			return false
		}
		for _, s := range r.fleet.AppendSnapshots(nil) {
			if s.Healthy && (len(s.Models) == 0 || !s.MetricsFresh) {
				return false
			}
		}
		return true
	})
}

// eventually waits for something that another goroutine brings about.
func (r *running) eventually(what string, ok func() bool) {
	r.tb.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			r.tb.Fatalf("%s: not after 30 s; log:\n%s", what, r.log)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// reply is an answer as a client sees it.
type reply struct {
	status int
	header http.Header
	body   string
	err    error // while reading the body
}

// transport keeps no connections, so that none outlives its test.
var transport = &http.Transport{DisableKeepAlives: true, DisableCompression: true}

var client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

// do sends a request and reads the answer to its end.
func do(tb testing.TB, method, url string, body io.Reader, header ...string) reply {
	tb.Helper()
	req, err := http.NewRequestWithContext(tb.Context(), method, url, body)
	if err != nil {
		tb.Fatalf("make a request: %v", err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("X-Prefixgate-Debug", "1")
	for i := 0; i+1 < len(header); i += 2 {
		if header[i+1] == "" {
			req.Header.Del(header[i])
			continue
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
}

func (r *running) post(path, body string, header ...string) reply {
	r.tb.Helper()
	return do(r.tb, http.MethodPost, r.URL+path, strings.NewReader(body), header...)
}

// ok is post for requests that must succeed.
func (r *running) ok(path, body string, header ...string) reply {
	r.tb.Helper()
	a := r.post(path, body, header...)
	if a.err != nil || a.status != http.StatusOK {
		r.tb.Fatalf("POST %s = %d, %v: %s", path, a.status, a.err, a.body)
	}
	return a
}

// completion is the body of a completion request.
func completion(prompt string, more ...string) string {
	quoted, _ := json.Marshal(prompt)
	return fmt.Sprintf(`{"model":%q,"prompt":%s,"max_tokens":4%s}`, demoModel, quoted, strings.Join(more, ""))
}

// chat is the body of a chat request of user and assistant messages in turn.
func chat(messages []string, more ...string) string {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	list := make([]message, len(messages))
	for i, m := range messages {
		list[i] = message{[]string{"user", "assistant"}[i%2], m}
	}
	quoted, _ := json.Marshal(list)
	return fmt.Sprintf(`{"model":%q,"messages":%s%s}`, demoModel, quoted, strings.Join(more, ""))
}

// words returns n words that differ from those of another seed.
func words(seed, n int) string {
	var b strings.Builder
	for i := range n {
		for v := uint(seed*1_000_003 + i); v > 0; v /= 20 {
			b.WriteByte("abcdefghijklmnoprstu"[v%20])
		}
		b.WriteString(" ")
	}
	return b.String()
}

// metric returns the value of a series, as /metrics shows it; 0 if there is none.
func (r *running) metric(series string) float64 {
	r.tb.Helper()
	a := do(r.tb, http.MethodGet, "http://"+r.AdminAddr()+"/metrics", nil)
	for line := range strings.SplitSeq(a.body, "\n") {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			var v float64
			fmt.Sscan(rest, &v)
			return v
		}
	}
	return 0
}

// noLeaks fails the test if goroutines outlive it that were not there before.
func noLeaks(tb testing.TB) {
	tb.Helper()
	before := goleak.IgnoreCurrent()
	tb.Cleanup(func() { goleak.VerifyNone(tb, before) })
}
