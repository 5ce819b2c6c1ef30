package simhttp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/sim"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"

	"github.com/prometheus/client_golang/prometheus"
)

// models are the tokenizers loaded so far, by folder. They are shared and live as long as the process.
var models sync.Map

// load loads the tokenizer in a folder, once.
func load(tb testing.TB, dir string) *tokenize.Model {
	tb.Helper()
	if m, ok := models.Load(dir); ok {
		return m.(*tokenize.Model)
	}
	m, err := tokenize.Load(tb.Context(), tokenize.Options{
		Model: dir, Mode: tokenize.ModeLocal, Timeout: time.Minute, Workers: 1, CacheBytes: 8 << 20,
	}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err != nil {
		tb.Fatalf("load the tokenizer in %s: %v", dir, err)
	}
	models.Store(dir, m)
	return m
}

// demo is the project's own model.
func demo(tb testing.TB) *tokenize.Model {
	tb.Helper()
	return load(tb, filepath.Join(testenv.Root(), "models", "prefixgate-demo"))
}

func start(tb testing.TB, opts Options) *Server {
	tb.Helper()
	s, err := New(tb.Context(), opts)
	if err != nil {
		tb.Fatalf("New: %v", err)
	}
	tb.Cleanup(func() { s.Close() })
	return s
}

// fast are engine options for tests that do not look at times.
func fast() sim.Options {
	return sim.Options{PrefillRate: math.Inf(1), DecodeRate: math.Inf(1)}
}

func do(tb testing.TB, s *Server, method, path, body string) (*http.Response, []byte) {
	tb.Helper()
	req, err := http.NewRequestWithContext(tb.Context(), method, s.URL()+path, strings.NewReader(body))
	if err != nil {
		tb.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatalf("%s %s: %v", method, path, err)
	}
	defer res.Body.Close()
	out, err := io.ReadAll(res.Body)
	if err != nil {
		tb.Fatalf("%s %s: read the answer: %v", method, path, err)
	}
	return res, out
}

// post sends a request that must succeed and decodes its answer.
func post(tb testing.TB, s *Server, path string, request any) map[string]any {
	tb.Helper()
	res, body := do(tb, s, http.MethodPost, path, string(mustJSON(request)))
	if res.StatusCode != http.StatusOK {
		tb.Fatalf("POST %s = %d %s", path, res.StatusCode, body)
	}
	var out map[string]any
	if err := json.Unmarshal(body, &out); err != nil {
		tb.Fatalf("POST %s: %v in %s", path, err, body)
	}
	return out
}

// dig follows keys and indexes into decoded JSON.
func dig(tb testing.TB, v any, path ...any) any {
	tb.Helper()
	for _, p := range path {
		switch k := p.(type) {
		case string:
			m, ok := v.(map[string]any)
			if !ok {
				tb.Fatalf("dig %v: %v is no object", path, v)
			}
			v = m[k]
		case int:
			l, ok := v.([]any)
			if !ok || k >= len(l) {
				tb.Fatalf("dig %v: %v has no element %d", path, v, k)
			}
			v = l[k]
		}
	}
	return v
}

func digInt(tb testing.TB, v any, path ...any) int {
	tb.Helper()
	f, ok := dig(tb, v, path...).(float64)
	if !ok {
		tb.Fatalf("%v is no number in %v", path, v)
	}
	return int(f)
}

// events reads a stream to its end.
func events(tb testing.TB, body []byte) []map[string]any {
	tb.Helper()
	var out []map[string]any
	done := false
	for line := range strings.SplitSeq(string(body), "\n\n") {
		data, ok := strings.CutPrefix(line, "data: ")
		switch {
		case line == "":
		case !ok:
			tb.Fatalf("stream line %q is no event", line)
		case data == "[DONE]":
			done = true
		default:
			var ev map[string]any
			if err := json.Unmarshal([]byte(data), &ev); err != nil {
				tb.Fatalf("event %q: %v", data, err)
			}
			out = append(out, ev)
		}
	}
	if !done {
		tb.Fatalf("stream without [DONE]: %s", body)
	}
	return out
}

type sample struct {
	Name    string
	Request struct {
		Method, Path string
		Body         json.RawMessage
		Headers      map[string]string
	}
	Status  int
	Headers map[string]string
	Body    string
}

// volatile are values that differ from run to run, or that are the model's own.
var volatile = regexp.MustCompile(`"(?:chat)?cmpl-[0-9a-f]{16}"|"modelperm-[0-9a-f]+"|"system_fingerprint":"[^"]*"|"created":\d+`)

// shape reduces JSON to what must be equal: order of keys, types, and all values but those that the model makes up.
func shape(raw string) string {
	out := volatile.ReplaceAllStringFunc(raw, func(m string) string {
		if key, _, ok := strings.Cut(m, ":"); ok && strings.HasPrefix(key, `"system`) || strings.HasPrefix(m, `"created`) {
			return key + ":~"
		}
		return "~"
	})
	out = regexp.MustCompile(`"(content|text)":"(?:[^"\\]|\\.)*"`).ReplaceAllString(out, `"$1":"~"`)
	return regexp.MustCompile(`"token_ids":\[[0-9,]*\]`).ReplaceAllString(out, `"token_ids":[~]`)
}

// Sent to the simulated replica in the order in which they were sent to a real one, requests get the same statuses, headers, fields in the
// same order, errors to the letter and, but for what a model writes, the same values. That includes every count of cached tokens.
func TestAnswersEqualThoseOfARealReplica(t *testing.T) {
	raw := readShared(t, "vllm/http_samples.json")
	var samples []sample
	if err := json.Unmarshal(raw, &samples); err != nil {
		t.Fatal(err)
	}
	dir := testenv.Tokenizer(t, "qwen3")
	engine := fast()
	engine.BlockTokens = 32
	s := start(t, Options{
		Model: "tiny-qwen3", Root: "models/tiny-qwen3", Adapters: map[string]string{"lora-a": "models/lora-a", "lora-b": "models/lora-b"},
		Tokenizer: load(t, dir), TokenizerFile: filepath.Join(dir, "tokenizer.json"), MaxModelLen: 4096, Engine: engine, AnswerTokens: 100_000,
	})
	// Not simulated: other interfaces, switches of a development server, and the raw strings of tokens.
	other := []string{"kv_event_sources", "tokenizer_info", "responses api", "anthropic messages", "anthropic count", "tokenize prompt"}
	seen := 0
	for _, sm := range samples {
		if slices.Contains(other, sm.Name) || strings.HasPrefix(sm.Name, "render") {
			continue
		}
		t.Run(sm.Name, func(t *testing.T) {
			body := sm.Request.Body
			switch sm.Name {
			case "err bad json":
				body = []byte(`{"model": }`)
			case "err content-type":
				body = []byte(`{}`)
			}
			if string(body) == "null" {
				body = nil
			}
			req, err := http.NewRequestWithContext(t.Context(), sm.Request.Method, s.URL()+sm.Request.Path, bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			if body != nil {
				req.Header.Set("Content-Type", "application/json")
			}
			for k, v := range sm.Request.Headers {
				req.Header.Set(k, v)
			}
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			got, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != sm.Status {
				t.Fatalf("status %d, want %d: %s", res.StatusCode, sm.Status, got)
			}
			for _, h := range []string{"Content-Type", "Allow"} {
				if g, w := res.Header.Get(h), sm.Headers[strings.ToLower(h)]; g != w {
					t.Errorf("%s: %q, want %q", h, g, w)
				}
			}
			if g, w := shape(string(got)), shape(sm.Body); g != w {
				t.Errorf("body\n%s\nwant\n%s", g, w)
			}
			seen++
		})
	}
	if seen < 35 {
		t.Errorf("%d samples compared, want at least 35", seen)
	}
}

// The prompt of the next turn begins with the tokens of this turn's prompt and answer: it finds exactly the blocks that the rules say.
func TestConversationsHitTheirOwnAnswers(t *testing.T) {
	for _, name := range []string{"demo", "llama3_1"} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(testenv.Root(), "models", "prefixgate-demo")
			if name != "demo" {
				dir = testenv.Tokenizer(t, name)
			}
			s := start(t, Options{Tokenizer: load(t, dir), Engine: fast()})
			b := s.opts.Engine.BlockTokens
			messages := []map[string]string{{"role": "system", "content": "You are brief. " + strings.Repeat("Be kind and exact. ", 30)}}
			want := 0
			for turn := range 6 {
				messages = append(messages, map[string]string{"role": "user", "content": fmt.Sprintf("Question %d: what is the capital of France?", turn)})
				out := post(t, s, "/v1/chat/completions", map[string]any{"messages": messages, "max_tokens": 20 + 13*turn})
				u := dig(t, out, "usage")
				cached := digInt(t, u, "prompt_tokens_details", "cached_tokens")
				prompt, answer := digInt(t, u, "prompt_tokens"), digInt(t, u, "completion_tokens")
				if cached != want {
					t.Errorf("turn %d: %d of %d prompt tokens cached, want %d", turn, cached, prompt, want)
				}
				messages = append(messages, map[string]string{"role": "assistant", "content": dig(t, out, "choices", 0, "message", "content").(string)})
				want = (prompt + answer - 1) / b * b
			}
		})
	}
}

func TestAnswersAreDeterministic(t *testing.T) {
	tok := demo(t)
	ask := func(seed uint64, prompt string, n int) []string {
		s := start(t, Options{Tokenizer: tok, Engine: fast(), Seed: seed})
		out := post(t, s, "/v1/completions", map[string]any{"prompt": prompt, "n": n, "max_tokens": 40})
		var texts []string
		for i := range n {
			texts = append(texts, dig(t, out, "choices", i, "text").(string))
		}
		return texts
	}
	a := ask(1, "Once upon a time", 2)
	if b := ask(1, "Once upon a time", 2); !slices.Equal(a, b) {
		t.Errorf("two servers of one seed answer %q and %q", a, b)
	}
	if a[0] == a[1] {
		t.Errorf("two choices are equal: %q", a)
	}
	if b := ask(2, "Once upon a time", 2); slices.Equal(a, b) {
		t.Errorf("seeds 1 and 2 both answer %q", a)
	}
	if b := ask(1, "Once upon a table", 2); slices.Equal(a, b) {
		t.Errorf("two prompts are both answered %q", a)
	}
}

func TestStreamsAddUpToTheAnswerInOnePiece(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: fast()})
	for _, c := range []struct {
		name, path string
		request    map[string]any
	}{
		{"chat", "/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "Tell me a story"}}}},
		{"chat with a limit", "/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "Tell me a story"}}, "max_completion_tokens": 7}},
		{"two choices", "/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "Tell me a story"}}, "n": 2}},
		{"completion", "/v1/completions", map[string]any{"prompt": "Tell me", "max_tokens": 200}},
		{"batch", "/v1/completions", map[string]any{"prompt": []string{"Tell me", "Tell you"}, "max_tokens": 20, "echo": true}},
		{"stop", "/v1/completions", map[string]any{"prompt": "Tell me a long story", "max_tokens": 400, "ignore_eos": true, "stop": []string{"e w"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			whole := post(t, s, c.path, c.request)
			c.request["stream"] = true
			c.request["stream_options"] = map[string]any{"include_usage": true}
			res, body := do(t, s, http.MethodPost, c.path, string(mustJSON(c.request)))
			if res.StatusCode != http.StatusOK {
				t.Fatalf("%d %s", res.StatusCode, body)
			}
			texts := map[int]string{}
			reasons := map[int]any{}
			var usage any
			for _, ev := range events(t, body) {
				if len(ev["choices"].([]any)) == 0 {
					usage = ev["usage"]
					continue
				}
				choice := dig(t, ev, "choices", 0)
				i := digInt(t, choice, "index")
				if reasons[i] != nil {
					t.Errorf("choice %d goes on after its end", i)
				}
				reasons[i] = dig(t, choice, "finish_reason")
				if delta, ok := choice.(map[string]any)["delta"]; ok {
					piece, _ := dig(t, delta, "content").(string)
					texts[i] += piece
				} else {
					texts[i] += dig(t, choice, "text").(string)
				}
			}
			for i, choice := range whole["choices"].([]any) {
				text, ok := choice.(map[string]any)["text"].(string)
				if !ok {
					text = dig(t, choice, "message", "content").(string)
				}
				if texts[i] != text || text == "" {
					t.Errorf("choice %d streams as %q, want %q", i, texts[i], text)
				}
				if want := dig(t, choice, "finish_reason"); reasons[i] != want {
					t.Errorf("choice %d ends with %v, want %v", i, reasons[i], want)
				}
			}
			for _, key := range []string{"prompt_tokens", "completion_tokens", "total_tokens"} {
				if g, w := digInt(t, usage, key), digInt(t, whole, "usage", key); g != w {
					t.Errorf("usage.%s = %d, want %d", key, g, w)
				}
			}
			if c.name == "stop" {
				text := dig(t, whole, "choices", 0, "text").(string)
				if strings.Contains(text, "e w") || dig(t, whole, "choices", 0, "stop_reason") != "e w" || dig(t, whole, "choices", 0, "finish_reason") != "stop" {
					t.Errorf("a stop string gives %q, %v", text, dig(t, whole, "choices", 0))
				}
			}
		})
	}
}

const tools = `[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{
	"city":{"type":"string"},"unit":{"enum":["celsius","kelvin"]},"days":{"type":"integer","minimum":2},"extra":{"type":"string"},
	"where":{"type":"object","properties":{"lat":{"type":"number"}}},"tags":{"type":"array","items":{"type":"string"}}},
	"required":["city","unit","days","where","tags"]}}},{"type":"function","function":{"name":"ping"}}]`

func TestToolCalls(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: fast()})
	check := func(t *testing.T, name, args string) {
		t.Helper()
		var v struct {
			City  *string
			Unit  string
			Days  int
			Extra *string
			Where struct{ Lat *float64 }
			Tags  []string
		}
		if err := json.Unmarshal([]byte(args), &v); err != nil {
			t.Fatalf("arguments %q: %v", args, err)
		}
		if name != "get_weather" || v.City == nil || v.Unit != "celsius" || v.Days != 2 || v.Extra != nil || v.Where.Lat == nil || len(v.Tags) != 1 {
			t.Errorf("call of %s with %s does not keep to the schema", name, args)
		}
	}
	for choice, reason := range map[string]string{`"required"`: "tool_calls", `{"type":"function","function":{"name":"get_weather"}}`: "stop"} {
		request := `{"messages":[{"role":"user","content":"Weather?"}],"tools":` + tools + `,"tool_choice":` + choice
		res, body := do(t, s, http.MethodPost, "/v1/chat/completions", request+`}`)
		if res.StatusCode != http.StatusOK {
			t.Fatalf("%d %s", res.StatusCode, body)
		}
		var out any
		json.Unmarshal(body, &out)
		call := dig(t, out, "choices", 0, "message", "tool_calls", 0)
		check(t, dig(t, call, "function", "name").(string), dig(t, call, "function", "arguments").(string))
		if got := dig(t, out, "choices", 0, "finish_reason"); got != reason {
			t.Errorf("tool_choice %s: finish_reason %v, want %s", choice, got, reason)
		}
		_, body = do(t, s, http.MethodPost, "/v1/chat/completions", request+`,"stream":true}`)
		name, args, last := "", "", any(nil)
		for _, ev := range events(t, body) {
			last = dig(t, ev, "choices", 0, "finish_reason")
			if calls, ok := dig(t, ev, "choices", 0, "delta").(map[string]any)["tool_calls"]; ok {
				if n, ok := dig(t, calls, 0, "function", "name").(string); ok {
					name += n
				}
				args += dig(t, calls, 0, "function", "arguments").(string)
			}
		}
		check(t, name, args)
		if last != "tool_calls" {
			t.Errorf("streamed: finish_reason %v, want tool_calls", last)
		}
	}
	out := post(t, s, "/v1/chat/completions", map[string]any{"messages": []any{map[string]any{"role": "user", "content": "Hi"}}, "tools": json.RawMessage(tools)})
	if dig(t, out, "choices", 0, "message", "content") == "" {
		t.Error("without tool_choice there is no text")
	}
}

func TestAdaptersAndSaltsShareNothing(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: fast(), Adapters: map[string]string{"a": "path/a", "b": "path/b"}})
	prompt := strings.Repeat("The same words for all. ", 30)
	ask := func(extra map[string]any) int {
		extra["prompt"], extra["max_tokens"] = prompt, 1
		return digInt(t, post(t, s, "/v1/completions", extra), "usage", "prompt_tokens_details", "cached_tokens")
	}
	for _, extra := range []map[string]any{
		{}, {"model": "a"}, {"model": "b"}, {"cache_salt": "x"}, {"cache_salt": "y"}, {"model": "a", "cache_salt": "x"},
	} {
		if got := ask(extra); got != 0 {
			t.Errorf("first request with %v finds %d tokens of others", extra, got)
		}
		if got := ask(extra); got == 0 {
			t.Errorf("second request with %v finds nothing", extra)
		}
	}
	if got := ask(map[string]any{"prompt_logprobs": 1}); got != 0 {
		t.Errorf("prompt_logprobs reads %d tokens from the cache", got)
	}
	res, body := do(t, s, http.MethodPost, "/reset_prefix_cache", "")
	if res.StatusCode != http.StatusOK {
		t.Fatalf("reset: %d %s", res.StatusCode, body)
	}
	if got := ask(map[string]any{}); got != 0 {
		t.Errorf("after a reset %d tokens are found", got)
	}
	_, metrics := do(t, s, http.MethodGet, "/metrics", "")
	if !strings.Contains(string(metrics), `vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""}`) {
		t.Error("metrics tell nothing of adapters")
	}
}

// endless starts a stream that will not end by itself and returns its body after the first event.
func endless(tb testing.TB, s *Server) (io.ReadCloser, *bufio.Reader, context.CancelFunc) {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(`{"prompt":"For ever","max_tokens":100000,"ignore_eos":true,"stream":true}`))
	if err != nil {
		tb.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		tb.Fatal(err)
	}
	r := bufio.NewReader(res.Body)
	if _, err := r.ReadString('\n'); err != nil {
		tb.Fatal(err)
	}
	return res.Body, r, cancel
}

// A client that leaves ends its request at once: else Shutdown, which waits for it, would not return before the test's end.
func TestClientsThatLeaveAreAborted(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: sim.Options{DecodeRate: 10}})
	body, _, cancel := endless(t, s)
	if n := s.Stats().InFlight; n != 1 {
		t.Errorf("InFlight = %d, want 1", n)
	}
	cancel()
	body.Close()
	if err := s.Shutdown(t.Context()); err != nil {
		t.Fatalf("Shutdown: %v", err)
	}
	if st := s.Stats(); st.Engine.Aborted != 1 || st.Engine.Running != 0 || st.Engine.UsedBlocks != 0 || st.Disconnects != 1 || st.InFlight != 0 {
		t.Errorf("Stats = %+v, want one aborted request and an empty engine", st)
	}
}

func TestKillResetsStreams(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: sim.Options{DecodeRate: 1000}})
	body, r, cancel := endless(t, s)
	defer cancel()
	defer body.Close()
	s.Kill()
	rest, err := io.ReadAll(r)
	if err == nil || strings.Contains(string(rest), "[DONE]") {
		t.Errorf("a killed replica's stream ends with error %v, want a broken connection", err)
	}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL()+"/health", nil)
	if res, err := http.DefaultClient.Do(req); err == nil {
		res.Body.Close()
		t.Error("a killed replica still answers")
	}
	again := start(t, Options{Listen: s.Addr(), Tokenizer: s.opts.Tokenizer, Engine: fast()})
	if a, b := startOf(t, again), float64(s.started.UnixMicro())/1e6; a <= b {
		t.Errorf("restarted replica tells start %v, want later than %v", a, b)
	}
}

func startOf(tb testing.TB, s *Server) (v float64) {
	tb.Helper()
	_, body := do(tb, s, http.MethodGet, "/metrics", "")
	for line := range strings.Lines(string(body)) {
		if n, _ := fmt.Sscanf(line, "process_start_time_seconds %g", &v); n == 1 {
			return v
		}
	}
	tb.Fatal("no process_start_time_seconds")
	return 0
}

func TestFaults(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: fast()})
	ask := func(stream bool) (int, string, error) {
		body := fmt.Sprintf(`{"prompt":"Hello","max_tokens":8,"stream":%v}`, stream)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, "", err
		}
		defer res.Body.Close()
		out, err := io.ReadAll(res.Body)
		return res.StatusCode, string(out), err
	}
	s.SetFault(Fault{Kind: FaultReset})
	if _, _, err := ask(false); err == nil {
		t.Error("FaultReset: the request succeeded")
	}
	s.SetFault(Fault{Kind: FaultUnavailable})
	if status, _, _ := ask(false); status != http.StatusServiceUnavailable {
		t.Errorf("FaultUnavailable: status %d", status)
	}
	s.SetFault(Fault{Kind: FaultCut, AfterTokens: 3})
	status, out, err := ask(true)
	if n := strings.Count(out, "data: "); status != http.StatusOK || err == nil || errors.Is(err, io.EOF) || n != 3 {
		t.Errorf("FaultCut: status %d, %d events, error %v, want 200, 3 and a broken connection", status, n, err)
	}
	s.SetFault(Fault{Kind: FaultUnhealthy})
	if res, _ := do(t, s, http.MethodGet, "/health", ""); res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("FaultUnhealthy: health %d", res.StatusCode)
	}
	if status, _, _ := ask(false); status != http.StatusOK {
		t.Errorf("FaultUnhealthy: inference %d, want 200", status)
	}
	s.SetFault(Fault{Kind: FaultHang})
	hung := make(chan error, 1)
	go func() {
		_, _, err := ask(false)
		hung <- err
	}()
	s.Close()
	if err := <-hung; err == nil {
		t.Error("FaultHang: the request was answered")
	}
}

// Every series has a name and labels that a real replica has too, so that what is learned here holds there.
func TestMetricsAreThoseOfARealReplica(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: fast(), Adapters: map[string]string{"a": "x"}})
	post(t, s, "/v1/completions", map[string]any{"prompt": strings.Repeat("Word after word. ", 20), "max_tokens": 3})
	_, body := do(t, s, http.MethodGet, "/metrics", "")
	label := regexp.MustCompile(`(\w+)="`)
	parse := func(text string) map[string][]string {
		out := map[string][]string{}
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "" {
				continue
			}
			name, rest, ok := strings.Cut(line, "{")
			if !ok {
				name, rest, _ = strings.Cut(line, " ")
			}
			out[name] = nil
			for _, m := range label.FindAllStringSubmatch(rest, -1) {
				out[name] = append(out[name], m[1])
			}
		}
		return out
	}
	theirs := parse(string(readShared(t, "vllm/metrics_under_load.txt")))
	theirs["vllm:lora_requests_info"] = []string{"max_lora", "running_lora_adapters", "waiting_lora_adapters"} // Captured with another replica.
	ours := parse(string(body))
	for name, labels := range ours {
		want, ok := theirs[name]
		if !ok {
			t.Errorf("%s is no name of vLLM's", name)
		}
		for _, l := range labels {
			if !slices.Contains(want, l) {
				t.Errorf("%s has the label %s, which vLLM's does not have", name, l)
			}
		}
		if name != "vllm:cache_config_info" && len(labels) != len(want) {
			t.Errorf("%s has labels %v, want %v", name, labels, want)
		}
	}
	for _, name := range []string{
		"process_start_time_seconds", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
		"vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total", "vllm:prefix_cache_queries_total",
		"vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket", "vllm:request_success_total", "vllm:lora_requests_info",
	} {
		if _, ok := ours[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
	if !strings.Contains(string(body), `vllm:generation_tokens_total{engine="0",model_name="prefixgate-demo"} 3`) {
		t.Errorf("three generated tokens are not counted")
	}
}

// Many clients at once, a third of whom leave: nothing stays behind, and no count is lost.
func TestManyClients(t *testing.T) {
	s := start(t, Options{Tokenizer: demo(t), Engine: sim.Options{PrefillRate: 2e5, DecodeRate: 2000, NumBlocks: 300, MaxRunning: 16}, MaxModelLen: 2000})
	var wg sync.WaitGroup
	for i := range 120 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 0))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			body := fmt.Sprintf(`{"prompt":"%s","max_tokens":%d,"stream":%v}`, strings.Repeat("Some words. ", rng.IntN(100)+i%3), 1+rng.IntN(60), i%2 == 0)
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			res, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if i%3 == 0 {
				return // leaves
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := s.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	st := s.Stats()
	if e := st.Engine; e.UsedBlocks != 0 || e.Running != 0 || e.Waiting != 0 || e.Submitted != e.Finished+e.Aborted || e.HitTokens == 0 || st.InFlight != 0 {
		t.Errorf("Stats = %+v, want an empty engine", st)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	if _, err := New(t.Context(), Options{MaxModelLen: -1, AnswerTokens: -1, Engine: sim.Options{BlockTokens: -1}}); err == nil {
		t.Error("New took nonsense")
	} else {
		for _, part := range []string{"tokenizer:", "max_model_len:", "answer_tokens:", "engine: block_tokens:"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("New = %q, want it to name %s", err, part)
			}
		}
	}
	if _, err := New(t.Context(), Options{Tokenizer: demo(t), MaxModelLen: 1000, Engine: sim.Options{NumBlocks: 10}}); err == nil {
		t.Error("New took a context longer than the cache")
	}
}

func readShared(tb testing.TB, name string) []byte {
	tb.Helper()
	b, err := os.ReadFile(testenv.Shared(tb, name))
	if err != nil {
		tb.Fatal(err)
	}
	return b
}
