package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"prefixgate/internal/config"
	"prefixgate/internal/openai"
	"prefixgate/internal/sim"
	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"

	"github.com/prometheus/client_golang/prometheus"
)

// helperVar makes the test's own binary play a program that the demonstration starts.
const helperVar = "PREFIXGATE_DEMO_TEST_HELPER"

func TestMain(m *testing.M) {
	switch os.Getenv(helperVar) {
	case "":
		os.Exit(m.Run())
	case "serve":
		fmt.Fprintln(os.Stderr, `time=now level=INFO msg="simulated replica listens" addr=127.0.0.1:4711 model=m`)
	case "stubborn": // does not end when asked to
		signal.Ignore(syscall.SIGTERM)
		fmt.Fprintln(os.Stderr, `{"level":"INFO","msg":"gateway listens","addr":"127.0.0.1:4712","policy":"p"}`)
	case "broken":
		fmt.Fprintln(os.Stderr, "no such model")
		os.Exit(3)
	}
	select {}
}

func demoModel() string { return filepath.Join(testenv.Root(), "models", "prefixgate-demo") }

func defaults(t *testing.T) *flags {
	t.Helper()
	f, err := parse(nil, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestWorkloadsAreEqualForEqualSeeds(t *testing.T) {
	s := defaults(t).shape
	a, b := newWorkload(s), newWorkload(s)
	if !reflect.DeepEqual(a, b) {
		t.Error("one seed gives two workloads")
	}
	s.seed++
	if reflect.DeepEqual(a, newWorkload(s)) {
		t.Error("two seeds give one workload")
	}
}

func TestWorkloadIsWhatTheDemonstrationPromises(t *testing.T) {
	m, err := tokenize.Load(t.Context(), tokenize.Options{Model: demoModel(), Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 1},
		slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	w := newWorkload(defaults(t).shape)
	if n := w.requests(); n < 100 {
		t.Errorf("%d requests, want at least 100", n)
	}
	users := map[int]int{}
	for _, c := range w.conversations {
		users[c.system]++
	}
	for i, text := range w.systems {
		enc, err := m.Encode(t.Context(), &openai.Request{Endpoint: openai.Completions, N: 1, Prompts: []openai.Prompt{{Text: text}}})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(enc.Prompts[0].IDs); n < 900 || n > 2100 {
			t.Errorf("system prompt %d has %d tokens, want one to two thousand", i, n)
		}
	}
	if len(users) < 4 || users[0] < 2 {
		t.Errorf("system prompts are used %v times, want several of them, shared", users)
	}
}

func TestSummary(t *testing.T) {
	results := []result{
		{ttft: 100 * time.Millisecond, prompt: 100, cached: 0, counted: 100, predicted: 0, replica: "a"},
		{ttft: 200 * time.Millisecond, prompt: 100, cached: 48, counted: 100, predicted: 48, replica: "a"},
		{ttft: 300 * time.Millisecond, prompt: 100, cached: 32, counted: 99, predicted: 48, replica: "b"},
		{err: errors.New("boom"), counted: -1, predicted: -1},
	}
	s := summarize("p", results, 4, time.Second)
	if s.requests != 4 || s.failed != 1 || s.firstError == nil || s.told != 3 || s.computed != 220 {
		t.Errorf("summary %+v", s)
	}
	for _, c := range []struct {
		name      string
		got, want float64
	}{
		{"hit rate", s.hitRate, 80.0 / 300},
		{"agree", s.agree, 2.0 / 3},
		{"counted", s.counted, 2.0 / 3},
		{"mean", s.mean.Seconds(), 0.2},
		{"p50", s.p50.Seconds(), 0.2},
		{"p99", s.p99.Seconds(), 0.3},
		{"request load", s.requestLoad, 2 / 0.75},
		{"computed load", s.computedLoad, 152.0 / 55},
	} {
		if c.got < c.want-1e-9 || c.got > c.want+1e-9 {
			t.Errorf("%s = %v, want %v", c.name, c.got, c.want)
		}
	}
}

func TestVerdict(t *testing.T) {
	before := summary{policy: "round-robin", requests: 10, told: 10, hitRate: 0.5, mean: time.Second}
	better := summary{policy: "least-ttft", requests: 10, told: 10, hitRate: 0.8, mean: time.Second / 2}
	if p := problems(before, better); p != nil {
		t.Errorf("problems of a better half: %v", p)
	}
	for name, change := range map[string]func(*summary){
		"hit rate":       func(s *summary) { s.hitRate = 0.5 },
		"first token":    func(s *summary) { s.mean = time.Second },
		"failed":         func(s *summary) { s.failed, s.told = 1, 9 },
		"told its":       func(s *summary) { s.told = 3 },
		"no request was": func(s *summary) { s.requests, s.told = 0, 0 },
	} {
		worse := better
		change(&worse)
		if p := problems(before, worse); len(p) != 1 || !strings.Contains(p[0], name) {
			t.Errorf("problems = %q, want one about %q", p, name)
		}
	}
	var out bytes.Buffer
	table(&out, before, better)
	for _, want := range []string{"+30.0 points", "2.0x less", "1000 ms"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("table lacks %q:\n%s", want, out.String())
		}
	}
}

// The clients' side against a replica itself: every conversation is played to its end, and each turn finds what the turns before it left.
func TestPlay(t *testing.T) {
	m, err := tokenize.Load(t.Context(), tokenize.Options{Model: demoModel(), Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 1},
		slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	server, err := simhttp.New(t.Context(), simhttp.Options{Tokenizer: m, Model: modelName, Engine: sim.Options{PrefillRate: 1e6, DecodeRate: 1e5}})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	w := newWorkload(shape{clients: 8, turns: 3, systems: 2, systemWords: 200, questionWords: 40, answerTokens: 20, meanThink: time.Microsecond})
	var out bytes.Buffer
	show := newProgress(&out, "none", w.requests())
	p := &player{url: server.URL(), model: modelName, client: http.DefaultClient, report: show.add}
	results := p.play(t.Context(), &w)
	show.draw(true)
	if len(results) != 24 {
		t.Fatalf("%d results, want 24", len(results))
	}
	s := summarize("none", results, 1, time.Second)
	if s.failed != 0 || s.hitRate < 0.5 || s.mean <= 0 || s.told != 0 {
		t.Errorf("summary %+v, want no failure, more than half cached and no prediction", s)
	}
	if !strings.Contains(out.String(), "24/24 requests") {
		t.Errorf("progress %q", out.String())
	}
	server.Kill()
	results = p.play(t.Context(), &w)
	if s := summarize("none", results, 1, time.Second); s.failed != 8 || s.requests != 8 {
		t.Errorf("without a replica: %+v, want each conversation to fail once", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if results := p.play(ctx, &w); len(results) != 0 {
		t.Errorf("interrupted: %d results", len(results))
	}
}

func TestGatewayConfigurationIsValid(t *testing.T) {
	cfg, err := config.Parse([]byte(gatewayConfig(`/a "folder"`, "least-ttft", []string{"http://127.0.0.1:1", "http://127.0.0.1:2"})))
	if err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil {
		t.Error(err)
	}
	if len(cfg.Fleet.Replicas) != 2 || cfg.Models[0].Tokenizer.Model != `/a "folder"` || !cfg.Server.DebugHeaders {
		t.Errorf("configuration %+v", cfg)
	}
}

// helper starts the test's own binary as a program.
func helper(t *testing.T, f *fleet, role string) *process {
	t.Helper()
	t.Setenv(helperVar, role)
	p, err := f.start(role, filepath.Base(f.bin))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestProgramsAreAlwaysEnded(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	if err := os.Symlink(self, filepath.Join(bin, filepath.Base(bin))); err != nil {
		t.Fatal(err)
	}
	f := &fleet{bin: bin}
	serving, stubborn, broken := helper(t, f, "serve"), helper(t, f, "stubborn"), helper(t, f, "broken")
	for p, want := range map[*process]string{serving: "http://127.0.0.1:4711", stubborn: "http://127.0.0.1:4712"} {
		if got, err := p.address(t.Context()); err != nil || got != want {
			t.Errorf("address = %q, %v, want %q", got, err, want)
		}
	}
	if _, err := broken.address(t.Context()); err == nil || !strings.Contains(err.Error(), "no such model") {
		t.Errorf("address of a broken program: %v, want its last words", err)
	}
	if err := f.failed(); err == nil || !strings.Contains(err.Error(), "broken ended") {
		t.Errorf("failed() = %v, want the broken one", err)
	}
	all := f.processes
	f.stop()
	for _, p := range all {
		if err := p.cmd.Process.Signal(syscall.Signal(0)); !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("%s still runs: %v", p.name, err)
		}
	}
	if _, err := programs(bin, "gateway"); err == nil || !strings.Contains(err.Error(), "make build") {
		t.Errorf("programs without a gateway: %v", err)
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range [][]string{{"-replicas", "0"}, {"more"}, {"-think", "-1s"}, {"-nonsense"}} {
		if _, err := parse(args, io.Discard); err == nil {
			t.Errorf("parse(%q) succeeded", args)
		}
	}
}
