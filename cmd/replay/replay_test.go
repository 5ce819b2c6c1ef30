package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"prefixgate/internal/config"
	"prefixgate/internal/gateway"
	"prefixgate/internal/replay"
	"prefixgate/internal/replica"
	"prefixgate/internal/sim"
	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"
)

// call runs the command and returns its exit code and output.
func call(args ...string) (code int, stdout, stderr string) {
	var out, errOut bytes.Buffer
	code = run(args, &out, &errOut)
	return code, out.String(), errOut.String()
}

// smallTrace writes a trace in Mooncake's format: conversations of four turns over one common block, three at a time.
func smallTrace(t *testing.T, spacing time.Duration) string {
	t.Helper()
	var b strings.Builder
	for i := range 36 {
		conversation := i/12*3 + i%3
		turn := i / 3 % 4
		ids := []int{0}
		for n := range 2 + turn {
			ids = append(ids, 1000*(conversation+1)+n)
		}
		fmt.Fprintf(&b, `{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": %s}`+"\n",
			time.Duration(i)*spacing/time.Millisecond, 512*len(ids)-100, strings.ReplaceAll(fmt.Sprint(ids), " ", ", "))
	}
	name := filepath.Join(t.TempDir(), "small.jsonl")
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestVirtualWritesEverything(t *testing.T) {
	dir := t.TempDir()
	args := func(n int) []string {
		return []string{
			"-trace", smallTrace(t, 100*time.Millisecond), "-policy", "all", "-replicas", "3", "-gateways", "2", "-staleness", "50ms", "-seed", "7",
			"-json", filepath.Join(dir, fmt.Sprint(n, ".json")), "-html", filepath.Join(dir, "report.html"), "-progress", "on",
		}
	}
	code, stdout, stderr := call(args(1)...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	if !strings.Contains(stderr, "round-robin") || !strings.Contains(stderr, "36/36") {
		t.Errorf("no progress bar: %q", stderr)
	}
	for _, want := range []string{"least-ttft", "prefix-hash", "random"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the table lacks %s:\n%s", want, stdout)
		}
	}
	if call(args(2)...); t.Failed() {
		return
	}
	one, err := os.ReadFile(filepath.Join(dir, "1.json"))
	if err != nil {
		t.Fatal(err)
	}
	two, err := os.ReadFile(filepath.Join(dir, "2.json"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(one, two) {
		t.Error("two runs with the same seed write different JSON")
	}
	var report replay.Report
	if err := json.Unmarshal(one, &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Results) != 10 || report.Results[0].Requests != 36 || report.Results[0].Policy != "least-ttft" {
		t.Errorf("report has %d results, the first %+v", len(report.Results), report.Results[0])
	}
	page, err := os.ReadFile(filepath.Join(dir, "report.html"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(page, []byte(`"policy":"least-ttft"`)) || bytes.Contains(page, []byte("http://")) && bytes.Count(page, []byte("http://")) != bytes.Count(page, []byte("http://www.w3.org")) {
		t.Error("the page lacks its data or names another host")
	}
}

func TestPoliciesTakeOptions(t *testing.T) {
	specs, err := parsePolicies("least-ttft?least_ttft.uncached_weight=2&probe_every=-1, weighted")
	if err != nil {
		t.Fatal(err)
	}
	if len(specs) != 2 || specs[0].opts.LeastTTFT.UncachedWeight != 2 || specs[0].opts.ProbeEvery != -1 || specs[0].opts.Policy != "least-ttft" || specs[1].opts.Policy != "weighted" {
		t.Errorf("specs = %+v", specs)
	}
	specs, err = parsePolicies("least-ttft?least_ttft.decode_cost=20ms")
	if err != nil || specs[0].opts.LeastTTFT.DecodeCost != 20*time.Millisecond {
		t.Errorf("specs = %+v, %v", specs, err)
	}
	for _, bad := range []string{"best", "least-ttft?nonsense=1", "least-ttft?least_ttft", "least-ttft?least_ttft.uncached_weight=many", "", "weighted?weighted.kv_threshold=3"} {
		if _, err := parsePolicies(bad); err == nil && bad != "" {
			t.Errorf("parsePolicies(%q) works", bad)
		}
	}
}

func TestWrongCallsAreExplained(t *testing.T) {
	trace := smallTrace(t, time.Second)
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("{\"timestamp\": 1, \"hash_ids\": [1], \"input_length\": 5000}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		code int
		want string
		args []string
	}{
		{2, "-trace FILE or -workload", nil},
		{2, "exclude each other", []string{"-trace", trace, "-workload", "chat"}},
		{2, "got \"best\"", []string{"-trace", trace, "-policy", "best"}},
		{2, "replicas: got 20000", []string{"-trace", trace, "-replicas", "20000"}},
		{2, "ticks: got sometimes", []string{"-trace", trace, "-ticks", "sometimes"}},
		{2, "workload: got \"tea\"", []string{"-workload", "tea"}},
		{2, "unexpected argument", []string{"-trace", trace, "more"}},
		{2, "flag provided but not defined", []string{"-nonsense"}},
		{2, "-speed", []string{"-trace", trace, "-speed", "0"}},
		{2, "512 tokens", []string{"-trace", trace, "-block-tokens", "16"}},
		{1, "no such file", []string{"-trace", trace + "x"}},
		{1, "line 1: input_length 5000 with 1 hash_ids", []string{"-trace", garbage}},
		{2, "-url", []string{"live", "-trace", trace}},
		{0, "Usage: replay", []string{"-help"}},
		{0, "Usage: replay live", []string{"live", "-help"}},
	} {
		code, _, stderr := call(c.args...)
		if code != c.code || !strings.Contains(stderr, c.want) {
			t.Errorf("replay %q: code %d, stderr %q; want code %d and %q", c.args, code, stderr, c.code, c.want)
		}
	}
}

func demoDir() string { return filepath.Join(testenv.Root(), "models", "prefixgate-demo") }

// world starts simulated replicas and a real gateway before them, all over HTTP, and returns the gateway's URL.
func world(t *testing.T, replicas int) string {
	t.Helper()
	m, err := tokenize.Load(t.Context(), tokenize.Options{Model: demoDir(), Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 2},
		slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	cfg := &config.Config{
		Server: config.Server{Listen: "127.0.0.1:0", DebugHeaders: true, DrainDelay: -1, DrainTimeout: 5 * time.Second},
		Models: []config.Model{{Tokenizer: tokenize.Options{Model: demoDir(), Workers: 2, Timeout: 5 * time.Second}}},
		Fleet:  replica.Options{Interval: 50 * time.Millisecond},
	}
	for range replicas {
		s, err := simhttp.New(t.Context(), simhttp.Options{
			Tokenizer: m, Model: "prefixgate-demo", Engine: sim.Options{PrefillRate: 100_000, DecodeRate: 2000},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		cfg.Fleet.Replicas = append(cfg.Fleet.Replicas, replica.Target{URL: s.URL()})
	}
	g, err := gateway.New(gateway.Options{
		Config: cfg, Log: slog.New(slog.DiscardHandler), Version: "test", Getenv: func(string) string { return "" },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("gateway: %v", err)
		}
	})
	url := "http://" + g.Addr()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		res, err := http.Get(url + "/readyz")
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return url
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the gateway is not ready after 30 s")
		}
	}
}

// The whole way: the trace's blocks become tokens, the real gateway tokenizes nothing, routes them by its index to simulated replicas, and
// what it says it expects is what these report.
func TestLiveAgainstARealGateway(t *testing.T) {
	url := world(t, 2)
	out := filepath.Join(t.TempDir(), "live.json")
	code, stdout, stderr := call("live", "-url", url, "-trace", smallTrace(t, 200*time.Millisecond), "-speed", "2", "-replicas", "2",
		"-prefill-rate", "100000", "-vocabulary", "1000", "-served-model", "prefixgate-demo", "-json", out)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{"measured", "simulated", "answers by replica", "decisions by reason"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("output lacks %q:\n%s", want, stdout)
		}
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var c comparison
	if err := json.Unmarshal(data, &c); err != nil {
		t.Fatal(err)
	}
	m := c.Measured
	if m.Requests != 36 || m.Failed != 0 || m.Predicted != 36 || len(m.Replicas) == 0 || len(m.Reasons) == 0 {
		t.Fatalf("%d requests, %d failed (%v), %d with predictions, replicas %v; want 36 answers with predictions", m.Requests, m.Failed, m.Failures, m.Predicted, m.Replicas)
	}
	if m.MatchAgreement < 0.95 || m.TokenHitRate < 0.4 {
		t.Errorf("agreement %.2f and hit rate %.2f, want at least 0.95 and 0.4", m.MatchAgreement, m.TokenHitRate)
	}
	if d := m.TokenHitRate - c.Simulated.TokenHitRate; d < -0.1 || d > 0.1 {
		t.Errorf("measured hit rate %.3f, simulated %.3f, want them within 0.1", m.TokenHitRate, c.Simulated.TokenHitRate)
	}
}

func TestLiveSendsRecordedPrompts(t *testing.T) {
	url := world(t, 1)
	var b strings.Builder
	for i := range 6 {
		fmt.Fprintf(&b, `{"timestamp": %d, "session": "s%d", "messages": [{"role": "system", "content": %q}, {"role": "user", "content": "number %d"}]}`+"\n",
			i*10, i, strings.Repeat("You answer in full sentences. ", 20), i)
	}
	name := filepath.Join(t.TempDir(), "prompts.jsonl")
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := call("live", "-url", url, "-trace", name, "-served-model", "prefixgate-demo", "-max-output", "3", "-simulate=false", "-json", "-")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var c comparison
	if err := json.Unmarshal([]byte(stdout), &c); err != nil {
		t.Fatal(err)
	}
	if c.Measured.Requests != 6 || c.Measured.Failed != 0 || c.Measured.CachedTokens == 0 || c.Simulated != nil {
		m := c.Measured
		t.Errorf("%d requests, %d failed (%v), %d tokens cached, simulated %v", m.Requests, m.Failed, m.Failures, m.CachedTokens, c.Simulated)
	}
	// And the same file in virtual time, by exact tokens.
	code, stdout, stderr = call("-trace", name, "-model", demoDir(), "-policy", "session,least-ttft", "-json", "-")
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	var report replay.Report
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatal(err)
	}
	if r := report.Results[1]; r.Requests != 6 || r.TokenHitRate < 0.3 {
		t.Errorf("virtual: %d requests with %.2f of the tokens cached, want 6 with at least 0.3", r.Requests, r.TokenHitRate)
	}
	if code, _, stderr := call("-trace", name); code != 2 || !strings.Contains(stderr, "-model") {
		t.Errorf("without a tokenizer: code %d, %q", code, stderr)
	}
}

func TestLiveCountsFailures(t *testing.T) {
	n := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	defer server.Close()
	code, stdout, stderr := call("live", "-url", server.URL, "-trace", smallTrace(t, time.Millisecond), "-limit", "3", "-simulate=false")
	if code != 1 || !strings.Contains(stderr, "no request was answered") || !strings.Contains(stdout, "status 503=3") {
		t.Errorf("code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
}
