package gateway

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/config"
	"prefixgate/internal/sim"
	"prefixgate/internal/sim/simhttp"
	"prefixgate/internal/testenv"
	"prefixgate/internal/tokenize"
)

// engine is a replica that does what a test wants: it answers health, metrics and models, and hands the rest to serve.
type engine struct {
	*httptest.Server
	mu sync.Mutex
	// requests are guarded by mu.
	requests []seen
}

// seen is a request as a replica saw it.
type seen struct {
	method, path string
	header       http.Header
	body         string
}

func startEngine(tb testing.TB, models string, serve http.HandlerFunc) *engine {
	tb.Helper()
	e := &engine{}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			return
		case r.URL.Path == "/metrics":
			io.WriteString(w, "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nprocess_start_time_seconds 1\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\"} 1\n")
			return
		case r.URL.Path == "/v1/models" && r.Method == http.MethodGet:
			io.WriteString(w, models)
			return
		}
		body, _ := io.ReadAll(r.Body)
		e.mu.Lock()
		e.requests = append(e.requests, seen{r.Method, r.URL.RequestURI(), r.Header.Clone(), string(body)})
		e.mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(body))
		serve(w, r)
	}))
	tb.Cleanup(func() {
		e.CloseClientConnections()
		e.Close()
	})
	return e
}

// last returns the last request that was not the gateway's own self-check.
func (e *engine) last(tb testing.TB) seen {
	tb.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range slices.Backward(e.requests) {
		if r.path != "/tokenize" {
			return r
		}
	}
	tb.Fatal("the replica saw no request")
	return seen{}
}

func (e *engine) count(path string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, r := range e.requests {
		if r.path == path {
			n++
		}
	}
	return n
}

const oneModel = `{"object":"list","data":[{"id":"prefixgate-demo","object":"model","created":1,"owned_by":"vllm","root":"r","parent":null,"max_model_len":4096,"x":1.0}]}`

func answerOK(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	io.WriteString(w, `{"choices":[{"index":0,"text":"x","message":{"role":"assistant","content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
}

// A replica that dies in mid-stream must show: no end of the chunked body, no end mark, nothing that was not the replica's.
// Elsewhere, recovery middleware swallowed the abort and the cut stream looked complete, or a JSON error was written into it.
func TestCutStreamLooksCut(t *testing.T) {
	replica := startReplica(t, func(o *simhttp.Options) { o.Engine.DecodeRate = 500 })
	g := start(t, testConfig(replica.URL()))
	replica.SetFault(simhttp.Fault{Kind: simhttp.FaultCut, AfterTokens: 5})
	conn, err := net.Dial("tcp", g.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := chat([]string{"Tell me of lakes."}, `,"stream":true,"max_tokens":50,"ignore_eos":true`)
	fmt.Fprintf(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	wire, _ := io.ReadAll(conn) // ends with the connection, in whatever way
	got := string(wire)
	if !strings.HasPrefix(got, "HTTP/1.1 200 OK\r\n") || strings.Count(got, "data: {") < 2 {
		t.Fatalf("the stream did not begin:\n%s", got)
	}
	if strings.HasSuffix(got, "0\r\n\r\n") || strings.Contains(got, "[DONE]") || strings.Contains(got, "error") {
		t.Errorf("the cut stream looks complete, or has something made up in it:\n%s", got)
	}
	g.eventually("the request is counted as broken", func() bool {
		return g.metric(`prefixgate_requests_total{endpoint="chat",model="prefixgate-demo",outcome="broken"}`) == 1
	})
	if strings.Contains(g.log.String(), "panic") {
		t.Errorf("a broken stream was logged as a panic:\n%s", g.log)
	}
	g.eventually("nothing is in flight", func() bool { return g.metric("prefixgate_requests_in_flight") == 0 })
}

// The next turn of a conversation begins with the answer of the one before: its blocks are known, too, streamed or not.
func TestAnswersAreRecorded(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			replicas := []*simhttp.Server{startReplica(t, nil), startReplica(t, nil)}
			g := start(t, testConfig(replicas[0].URL(), replicas[1].URL()))
			messages := []string{"Hello. " + words(1, 40)}
			before := 0
			for turn := range 5 {
				more := `,"max_tokens":40,"ignore_eos":true` // more than two blocks
				if stream {
					more += `,"stream":true,"stream_options":{"include_usage":true}`
				}
				a := g.ok("/v1/chat/completions", chat(messages, more))
				matched, _ := strconv.Atoi(a.header.Get("X-Prefixgate-Matched-Tokens"))
				text, prompt, generated, cached := readAnswer(t, a.body)
				if matched != cached {
					t.Errorf("turn %d: predicted %d cached tokens, the engine says %d", turn, matched, cached)
				}
				if turn > 0 && matched < before/16*16 {
					t.Errorf("turn %d: %d tokens matched, want at least the %d of prompt and answer before", turn, matched, before)
				}
				// What the engine holds: all but the last token, which ends the answer.
				before = prompt + generated - 1
				messages = append(messages, text, fmt.Sprintf("And now number %d?", turn))
				g.eventually("the answer is recorded", func() bool {
					return g.metric(`prefixgate_records_total{kind="answer"}`) == float64(turn+1)
				})
			}
		})
	}
}

// readAnswer reads a chat answer, streamed or not.
func readAnswer(tb testing.TB, body string) (text string, prompt, generated, cached int) {
	tb.Helper()
	read := func(data string) {
		var a struct {
			Choices []struct {
				Message, Delta struct{ Content string }
				Text           string
			}
			Usage *struct {
				Prompt    int `json:"prompt_tokens"`
				Generated int `json:"completion_tokens"`
				Details   struct {
					Cached int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(data), &a); err != nil {
			tb.Fatalf("answer %q: %v", data, err)
		}
		for _, c := range a.Choices {
			text += c.Message.Content + c.Delta.Content + c.Text
		}
		if a.Usage != nil {
			prompt, generated, cached = a.Usage.Prompt, a.Usage.Generated, a.Usage.Details.Cached
		}
	}
	if strings.HasPrefix(body, "{") {
		read(body)
		return text, prompt, generated, cached
	}
	for line := range strings.SplitSeq(body, "\n") {
		if data, ok := strings.CutPrefix(line, "data: "); ok && data != "[DONE]" {
			read(data)
		}
	}
	return text, prompt, generated, cached
}

// A second request with the same prefix that comes while the first is still being computed belongs to the same replica.
func TestConcurrentPrefixesMeet(t *testing.T) {
	slow := func(o *simhttp.Options) { o.Engine.PrefillRate = 4000 }
	replicas := []*simhttp.Server{startReplica(t, slow), startReplica(t, slow), startReplica(t, slow)}
	g := start(t, testConfig(replicas[0].URL(), replicas[1].URL(), replicas[2].URL()))
	prompt := words(7, 400) // half a second
	first := make(chan reply, 1)
	go func() { first <- g.post("/v1/completions", completion(prompt)) }()
	g.eventually("the first request is being computed", func() bool {
		n := 0
		for _, r := range replicas {
			s := r.Stats().Engine
			n += s.Running + s.Waiting
		}
		return n == 1
	})
	second := g.ok("/v1/completions", completion(prompt+"more"))
	a := <-first
	if a.status != http.StatusOK || a.header.Get("X-Prefixgate-Replica") != second.header.Get("X-Prefixgate-Replica") {
		t.Errorf("first went to %s, second to %s, want one place", a.header.Get("X-Prefixgate-Replica"), second.header.Get("X-Prefixgate-Replica"))
	}
	if got := second.header.Get("X-Prefixgate-Matched-Tokens"); got == "0" || !strings.Contains(strings.ReplaceAll(second.body, " ", ""), `"cached_tokens":`+got) {
		t.Errorf("second: predicted %s, answer %s", got, second.body)
	}
}

// Bodies that are not JSON are refused by the gateway, briefly; all others are the engine's to judge, and never a 5xx.
func TestMalformedBodies(t *testing.T) {
	g := start(t, testConfig(startReplica(t, nil).URL()))
	deep := strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000)
	for _, c := range []struct {
		name, body string
		status     int // 0: whatever the engine says, below 500
	}{
		{"empty", "", 400},
		{"null", "null", 400},
		{"array", "[]", 400},
		{"number", "42", 400},
		{"cut", `{"model":`, 400},
		{"garbage after", `{"model":"prefixgate-demo","messages":[]} canary-text`, 400},
		{"model of a wrong type", `{"model":7,"messages":"canary-text"}`, 400},
		{"not UTF-8", "{\"model\":\"prefixgate-demo\",\"messages\":[{\"role\":\"user\",\"content\":\"canary-text \xff\"}]}", 400},
		{"deep", `{"model":"prefixgate-demo","messages":` + deep + `}`, 0},
		{"no messages", `{"model":"prefixgate-demo"}`, 0},
		{"empty messages", `{"model":"prefixgate-demo","messages":[]}`, 0},
		{"messages of a wrong type", `{"model":"prefixgate-demo","messages":"canary-text"}`, 0},
		{"content an object", `{"model":"prefixgate-demo","messages":[{"role":"user","content":{"type":"text"}}]}`, 0},
		{"content empty", `{"model":"prefixgate-demo","messages":[{"role":"user","content":[]}]}`, 0},
		{"no content", `{"model":"prefixgate-demo","messages":[{"role":"assistant"}]}`, 0},
		{"lone surrogate", `{"model":"prefixgate-demo","messages":[{"role":"user","content":"ok \ud800 bad"}]}`, 0},
		{"null character", `{"model":"prefixgate-demo","messages":[{"role":"user","content":"a\u0000b"}]}`, 0},
		{"own template", `{"model":"prefixgate-demo","chat_template":"{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}","messages":[{"role":"user","content":"a"}]}`, 0},
		{"unknown model", `{"model":"canary-text","messages":[{"role":"user","content":"a"}]}`, 404},
		{"a URL for a model", `{"model":"http://169.254.169.254/","messages":[{"role":"user","content":"a"}]}`, 404},
		{"no model", `{"messages":[{"role":"user","content":"a"}]}`, 200},
	} {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions"} {
			if path == "/v1/completions" && c.status == 200 {
				continue
			}
			a := g.post(path, c.body)
			if a.err != nil || c.status != 0 && a.status != c.status || a.status >= 500 {
				t.Errorf("%s to %s = %d, %v: %s, want %d", c.name, path, a.status, a.err, a.body, c.status)
			}
			if a.status >= 400 {
				var e struct {
					Error struct{ Message, Type string }
				}
				if json.Unmarshal([]byte(a.body), &e) != nil || e.Error.Message == "" {
					t.Errorf("%s to %s: %s, want an error in OpenAI's shape", c.name, path, a.body)
				}
			}
		}
	}
	if n := g.metric("prefixgate_panics_total"); n != 0 {
		t.Errorf("panics = %v, want none", n)
	}
	for name, text := range map[string]string{"log": g.log.String(), "access log": g.access.String(), "metrics": do(t, http.MethodGet, g.URL+"/metrics", nil).body} {
		if strings.Contains(text, "canary-text") {
			t.Errorf("the %s shows what a client sent", name)
		}
	}
}

// What is forwarded is what came, byte for byte; only an alias is replaced, and a compressed body is sent plain.
func TestBodiesArePassedOnUnchanged(t *testing.T) {
	e := startEngine(t, oneModel, answerOK)
	c := testConfig(e.URL)
	c.Models[0].Name, c.Models[0].Aliases = demoModel, []string{"alias"}
	g := start(t, c)
	body := `{ "model" : "%s","messages":[{"role":"user","content":"hi é\u00e9 \ud83d\ude00"}],"seed":9007199254740993,"metadata":{"id":18446744073709551615},` +
		`"temperature":1.0,"logit_bias":{"50256":-100.000},"chat_template_kwargs":{"enable_thinking":false},"top_k":5,"vllm_xargs":{"k":"v"},"x_future":{"a":[1,null,{"b":true}]},` +
		`"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"zeta":{},"alpha":{}}}}}],"temperature":2.0}` + "\n "
	plain := fmt.Sprintf(body, demoModel)
	g.ok("/v1/chat/completions", plain)
	if got := e.last(t).body; got != plain {
		t.Errorf("forwarded %s, want %s", got, plain)
	}
	g.ok("/v1/chat/completions", fmt.Sprintf(body, "alias"))
	if got := e.last(t).body; got != plain {
		t.Errorf("an alias was forwarded as %s, want %s", got, plain)
	}
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	io.WriteString(zw, plain)
	zw.Close()
	a := do(t, http.MethodPost, g.URL+"/v1/chat/completions", bytes.NewReader(zipped.Bytes()), "Content-Encoding", "gzip")
	if last := e.last(t); a.status != 200 || last.body != plain || last.header.Get("Content-Encoding") != "" || last.header.Get("Content-Length") != strconv.Itoa(len(plain)) {
		t.Errorf("gzip: %d, forwarded %d bytes with %v", a.status, len(last.body), last.header)
	}
	if got := a.header.Get("X-Prefixgate-Prompt-Tokens"); got == "0" || got == "" {
		t.Errorf("gzip: %s prompt tokens, want those of the plain body", got)
	}
	if a := g.post("/v1/chat/completions", plain, "Content-Encoding", "br"); a.status != http.StatusUnsupportedMediaType {
		t.Errorf("br: %d %s, want 415", a.status, a.body)
	}
}

// Hop-by-hop headers and the gateway's own end here; ids and the client's key go on.
func TestHeaders(t *testing.T) {
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Prefixgate-Replica", "forged")
		w.Header().Set("X-Request-Id", r.Header.Get("X-Request-Id"))
		answerOK(w, r)
	})
	c := testConfig(e.URL)
	c.Server.DebugHeaders = false
	g := start(t, c)
	a := g.ok("/v1/completions", completion("a"), "Connection", "authorization, x-request-id", "X-Request-Id", "my-req-1", "Authorization", "Bearer key",
		"Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Prefixgate-Attempt", "7", "Te", "trailers")
	h := e.last(t).header
	if h.Get("X-Request-Id") != "my-req-1" || h.Get("Traceparent") == "" || h.Get("Connection") != "" {
		t.Errorf("the replica got %v", h)
	}
	for name := range h {
		if strings.HasPrefix(name, "X-Prefixgate") {
			t.Errorf("the replica got %s", name)
		}
	}
	if got := a.header["X-Request-Id"]; len(got) != 1 || got[0] != "my-req-1" || a.header.Get("X-Prefixgate-Replica") != "" {
		t.Errorf("the client got %v", a.header)
	}
	g.eventually("the access line has the id", func() bool { return strings.Contains(g.access.String(), `"request_id":"my-req-1"`) })
	a = g.ok("/v1/completions", completion("a"), "X-Request-Id", strings.Repeat("x", 10<<10))
	if got := a.header.Get("X-Request-Id"); len(got) != 32 || e.last(t).header.Get("X-Request-Id") != got {
		t.Errorf("an invalid id became %q", got)
	}
	if a := g.post("/v1/completions", "{"); a.header.Get("X-Request-Id") == "" || a.header.Get("X-Prefixgate-Error") != "1" {
		t.Errorf("a refusal has %v, want an id and the mark of the gateway", a.header)
	}
}

// Endpoints without prefix routing go to the least loaded replica, are counted, and are not looked into.
func TestOtherEndpoints(t *testing.T) {
	release := make(chan struct{})
	var busy sync.WaitGroup
	serve := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/embeddings" {
			busy.Done()
			<-release
		}
		w.Header().Set("X-Engine", "yes")
		w.WriteHeader(http.StatusTeapot)
		io.Copy(w, r.Body)
	}
	engines := []*engine{startEngine(t, oneModel, serve), startEngine(t, oneModel, serve), startEngine(t, oneModel, serve)}
	g := start(t, testConfig(engines[0].URL, engines[1].URL, engines[2].URL))
	busy.Add(30)
	var done sync.WaitGroup
	for range 30 {
		done.Go(func() { g.post("/v1/embeddings", `{"model":"prefixgate-demo","input":["same text"]}`) })
	}
	busy.Wait()
	for _, e := range engines {
		// Two that are decided in the same instant may see the same counts.
		if n := e.count("/v1/embeddings"); n < 7 || n > 13 {
			t.Errorf("a replica got %d of 30 embeddings, want about 10: they are in flight", n)
		}
	}
	close(release)
	done.Wait()

	random := make([]byte, 5<<20)
	for i := range random {
		random[i] = byte(i * 2654435761 >> 7)
	}
	for _, chunked := range []bool{false, true} {
		var body io.Reader = bytes.NewReader(random)
		if chunked {
			body = io.MultiReader(body)
		}
		a := do(t, http.MethodPost, g.URL+"/v1/audio/transcriptions?x=1", body, "Content-Type", `multipart/form-data; boundary="odd b"`, "Authorization", "Bearer k")
		if a.status != http.StatusTeapot || a.body != string(random) || a.header.Get("X-Engine") != "yes" {
			t.Errorf("multipart (chunked %v): %d with %d bytes", chunked, a.status, len(a.body))
		}
	}
	for _, path := range []string{"/v1/responses", "/v1/messages", "/v1/rerank", "/tokenize", "/detokenize", "/v1/audio/speech"} {
		body := `{"model":"prefixgate-demo","input":"x"} `
		if a := g.post(path, body); a.status != http.StatusTeapot || a.body != body {
			t.Errorf("%s = %d %q, want it forwarded", path, a.status, a.body)
		}
	}
	for _, path := range []string{"/v1/load_lora_adapter", "/v1/Unload_Lora_Adapter", "/sleep", "/v1/%6coad_lora_adapter", "/reset_prefix_cache", "/collective_rpc", "/pause", "/v2/x", "/"} {
		if a := g.post(path, `{}`); a.status != http.StatusNotFound || a.header.Get("X-Engine") != "" {
			t.Errorf("%s = %d %q, want 404 of the gateway", path, a.status, a.body)
		}
	}
	if a := g.post("/v1/embeddings2", `{"model":"nobody","input":"x"}`); a.status != http.StatusNotFound {
		t.Errorf("an unknown model = %d, want 404", a.status)
	}
	if a := do(t, http.MethodGet, g.URL+"/v1/chat/completions", nil); a.status != http.StatusMethodNotAllowed || a.header.Get("Allow") == "" {
		t.Errorf("GET of a POST path = %d, Allow %q", a.status, a.header.Get("Allow"))
	}
	g.eventually("nothing is in flight", func() bool {
		for _, s := range g.fleet.AppendSnapshots(nil) {
			if s.InFlight != 0 || s.PrefillTokens != 0 {
				return false
			}
		}
		return g.metric("prefixgate_requests_in_flight") == 0
	})
}

func TestModels(t *testing.T) {
	other := `{"object":"list","data":[{"id":"prefixgate-demo","object":"model","root":"other"},{"id":"org/big model","object":"model","max_model_len":9},{"id":"lora","parent":"prefixgate-demo"}]}`
	a, b := startEngine(t, oneModel, answerOK), startEngine(t, other, answerOK)
	c := testConfig(a.URL, b.URL)
	c.Models[0].Name, c.Models[0].Aliases = demoModel, []string{"alias"}
	g := start(t, c)
	list := do(t, http.MethodGet, g.URL+"/v1/models", nil)
	var got struct {
		Object string
		Data   []map[string]any
	}
	if err := json.Unmarshal([]byte(list.body), &got); err != nil || got.Object != "list" {
		t.Fatalf("GET /v1/models = %s", list.body)
	}
	var ids []string
	for _, m := range got.Data {
		ids = append(ids, m["id"].(string))
	}
	if want := []string{demoModel, "org/big model", "lora", "alias"}; !slices.Equal(ids, want) {
		t.Errorf("models = %q, want %q", ids, want)
	}
	if got.Data[0]["root"] != "r" || got.Data[0]["max_model_len"] != 4096.0 || got.Data[3]["max_model_len"] != 4096.0 || !strings.Contains(list.body, `"x":1.0`) {
		t.Errorf("metadata is lost: %s", list.body)
	}
	for path, status := range map[string]int{
		"/v1/models/prefixgate-demo": 200, "/v1/models/org/big%20model": 200, "/v1/models/alias": 200, "/v1/models/lora": 200,
		"/v1/models/none": 404, "/v1/models/": 404,
	} {
		if a := do(t, http.MethodGet, g.URL+path, nil); a.status != status {
			t.Errorf("GET %s = %d %s, want %d", path, a.status, a.body, status)
		}
	}
	if h := do(t, http.MethodHead, g.URL+"/v1/models", nil); h.status != 200 || h.body != "" || h.header.Get("Content-Length") != strconv.Itoa(len(list.body)) {
		t.Errorf("HEAD = %d %v", h.status, h.header)
	}
	if o := do(t, http.MethodOptions, g.URL+"/v1/models", nil); o.status != http.StatusNoContent || !strings.Contains(o.header.Get("Allow"), "GET") {
		t.Errorf("OPTIONS = %d %v", o.status, o.header)
	}
	none := start(t, testConfigUnreachable())
	if a := do(t, http.MethodGet, none.URL+"/v1/models", nil); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("without a replica: %d %v", a.status, a.header)
	}
	if a := none.post("/v1/completions", completion("x")); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
		t.Errorf("a completion without a replica: %d %s", a.status, a.body)
	}
}

// testConfigUnreachable has one replica, which is not there, and becomes ready soon.
func testConfigUnreachable() *config.Config {
	c := testConfig("http://127.0.0.1:1")
	c.Server.StartupTimeout = 10 * time.Millisecond
	return c
}

// The answer arrives although most of the body was never read: elsewhere, and here at first, the connection was reset on the way.
func TestBodyLimit(t *testing.T) {
	e := startEngine(t, oneModel, answerOK)
	c := testConfig(e.URL)
	c.Server.MaxBodyBytes = 100_000
	g := start(t, c)
	g.ok("/v1/completions", completion(strings.Repeat("a ", 40_000)))
	big := completion(strings.Repeat("a ", 60_000))
	for name, a := range map[string]reply{
		"with a length":    g.post("/v1/completions", big),
		"chunked":          do(t, http.MethodPost, g.URL+"/v1/completions", io.MultiReader(strings.NewReader(big))),
		"another endpoint": g.post("/v1/embeddings", big),
		"streamed":         do(t, http.MethodPost, g.URL+"/v1/audio/x", io.MultiReader(strings.NewReader(big)), "Content-Type", "multipart/form-data; boundary=x"),
	} {
		if a.status != http.StatusRequestEntityTooLarge || !strings.Contains(a.body, "100000") {
			t.Errorf("%s: %d %s %v, want a 413 that names the limit", name, a.status, a.body, a.err)
		}
	}
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	zw.Write(make([]byte, 10<<20))
	zw.Close()
	if a := do(t, http.MethodPost, g.URL+"/v1/completions", &zipped, "Content-Encoding", "gzip"); a.status != http.StatusRequestEntityTooLarge {
		t.Errorf("a bomb of %d bytes: %d, want 413", zipped.Len(), a.status)
	}
}

// Clients that send a byte now and then are cut off; an answer that takes longer is not.
func TestSlowClientsAreCutOff(t *testing.T) {
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 10 {
			io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
			w.(http.Flusher).Flush()
			time.Sleep(100 * time.Millisecond)
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	c := testConfig(e.URL)
	c.Server.HeaderTimeout, c.Server.BodyTimeout = 300*time.Millisecond, 300*time.Millisecond
	g := start(t, c)
	dial := func(first string) (net.Conn, *bufio.Reader) {
		conn, err := net.Dial("tcp", g.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		io.WriteString(conn, first)
		return conn, bufio.NewReader(conn)
	}
	for name, first := range map[string]string{
		"header": "POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-A: ",
		"body":   "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{\"a\":\"",
	} {
		conn, in := dial(first)
		stop := make(chan struct{})
		go func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
					io.WriteString(conn, "a")
				}
			}
		}()
		answer, _ := io.ReadAll(in) // returns because the gateway closes the connection
		close(stop)
		if name == "body" && !strings.Contains(string(answer), " 408 ") {
			t.Errorf("a slow body got %q, want a 408", answer)
		}
	}
	a := g.ok("/v1/completions", completion("a", `,"stream":true`))
	if !strings.HasSuffix(a.body, "data: [DONE]\n\n") {
		t.Errorf("a stream longer than the timeouts was cut: %q", a.body)
	}
}

// Bodies that break off, or are not HTTP, used to be answered with an empty 200, and where they are streamed to be held against the
// replica, which some of them could take out.
func TestBrokenBodiesAreTheClientsFault(t *testing.T) {
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		answerOK(w, r)
	})
	c := testConfig(e.URL)
	c.Server.BodyTimeout = 300 * time.Millisecond
	c.Fleet.SoftFailures = 1
	g := start(t, c)
	const chunked, cut = "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", "Content-Length: 1000\r\n\r\nhello"
	for _, kind := range []string{"application/json", "multipart/form-data; boundary=x"} {
		for _, b := range []struct {
			name, rest string
			leave      bool
			want       string
		}{
			{"malformed", chunked + "zz\r\nhello", false, " 400 "},
			{"cut", cut, true, " 400 "},
			{"cut in a chunk", chunked + "5\r\nhe", true, " 400 "},
			{"slow", cut, false, " 408 "},
		} {
			conn, err := net.Dial("tcp", g.Addr())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			io.WriteString(conn, "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: a\r\nContent-Type: "+kind+"\r\n"+b.rest)
			if b.leave {
				conn.(*net.TCPConn).CloseWrite()
			}
			answer, _ := io.ReadAll(conn) // returns because the gateway closes the connection
			if !strings.Contains(string(answer), b.want) {
				t.Errorf("%s %s: answer %q, want %q", kind, b.name, answer, b.want)
			}
		}
	}
	if n := g.metric(`prefixgate_replica_healthy{replica="` + e.URL + `"}`); n != 1 {
		t.Error("the replica was taken out for what clients sent")
	}
	g.ok("/v1/completions", completion("a"))
}

// With every place taken new requests are refused at once; places come back however requests end.
func TestMaxInFlight(t *testing.T) {
	block := make(chan struct{})
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/tokenize" {
			return
		}
		select {
		case <-block:
			answerOK(w, r)
		case <-r.Context().Done():
		}
	})
	c := testConfig(e.URL)
	c.Server.MaxInFlight = 8
	g := start(t, c)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, g.URL+"/v1/completions", strings.NewReader(completion("a")))
			if resp, err := client.Do(req); err == nil {
				resp.Body.Close()
			}
		})
	}
	g.eventually("eight are under way", func() bool { return e.count("/v1/completions") == 8 })
	if a := g.post("/v1/completions", completion("b")); a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
		t.Errorf("the ninth = %d %s, want 429", a.status, a.body)
	}
	cancel()
	wg.Wait()
	g.eventually("the places are free", func() bool { return g.underWay.Load() == 0 })
	close(block)
	for range 20 {
		g.ok("/v1/completions", completion("c"))
	}
	g.eventually("clients that left are counted as that", func() bool {
		return g.metric(`prefixgate_requests_total{endpoint="completions",model="prefixgate-demo",outcome="client_gone"}`) == 8
	})
	for _, s := range g.fleet.AppendSnapshots(nil) {
		if !s.Healthy || s.InFlight != 0 {
			t.Errorf("the replica is %+v, want healthy: clients left", s)
		}
	}
}

// A shutdown fails readiness at once, serves on for a while, and lets streams end; idle ones end it early.
func TestDrain(t *testing.T) {
	noLeaks(t)
	more := make(chan struct{})
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
		w.(http.Flusher).Flush()
		<-more
		io.WriteString(w, "data: [DONE]\n\n")
	})
	c := testConfig(e.URL)
	c.Server.DrainDelay = 500 * time.Millisecond
	g := start(t, c)
	req, _ := http.NewRequest(http.MethodPost, g.URL+"/v1/completions", strings.NewReader(completion("a", `,"stream":true`)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	g.stop()
	g.eventually("readiness fails", func() bool { return g.notReady() == "draining" })
	if a := do(t, http.MethodGet, g.URL+"/readyz", nil); a.status != http.StatusServiceUnavailable {
		t.Errorf("/readyz while draining = %d", a.status)
	}
	if a := do(t, http.MethodGet, g.URL+"/livez", nil); a.status != http.StatusOK {
		t.Errorf("/livez while draining = %d", a.status)
	}
	if a := do(t, http.MethodGet, g.URL+"/v1/models", nil); a.status != http.StatusOK {
		t.Errorf("a request within the delay = %d %v", a.status, a.err)
	}
	g.eventually("the listener is closed", func() bool {
		conn, err := net.Dial("tcp", g.Addr())
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	close(more)
	rest, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Errorf("the stream ended with %q, %v, want its own end", rest, err)
	}
	g.end()
}

// What does not end by itself is broken off at the end of the grace.
func TestDrainHasAnEnd(t *testing.T) {
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {}\n\n")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	c := testConfig(e.URL)
	c.Server.DrainTimeout = 100 * time.Millisecond
	g := start(t, c)
	req, _ := http.NewRequest(http.MethodPost, g.URL+"/v1/completions", strings.NewReader(completion("a", `,"stream":true`)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	g.end()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the stream that was broken off looks complete")
	}
}

// Redis may be away at the start, frozen later, and come back: no request fails.
func TestRedisFaults(t *testing.T) {
	server := testenv.StartRedis(t)
	url := startReplica(t, nil).URL()
	c := testConfig(url, startReplica(t, nil).URL())
	c.Redis.URL = config.Secret("redis://" + server.Addr)
	server.Kill()
	g := start(t, c)
	prompt := words(3, 100)
	ask := func(when string) {
		t.Helper()
		for range 5 {
			if a := g.post("/v1/completions", completion(prompt)); a.status != http.StatusOK {
				t.Fatalf("%s: %d %s", when, a.status, a.body)
			}
		}
	}
	ask("Redis away at the start")
	if g.metric("prefixgate_redis_up") != 0 {
		g.eventually("Redis is known to be away", func() bool { ask("away"); return g.metric("prefixgate_redis_up") == 0 })
	}
	server.Restart()
	g.eventually("Redis is used", func() bool { ask("Redis back"); return g.metric("prefixgate_redis_up") == 1 })
	server.Freeze()
	ask("Redis frozen")
	server.Thaw()
	g.eventually("Redis is used again", func() bool { ask("Redis thawed"); return g.metric("prefixgate_redis_up") == 1 })
}

// Explain tells what would be done, and does nothing.
func TestExplain(t *testing.T) {
	a, b := startReplica(t, nil), startReplica(t, nil)
	c := testConfig(a.URL(), b.URL())
	c.Server.AdminListen = "127.0.0.1:0"
	c.Server.Explain.Enabled = true
	g := start(t, c)
	prompt := words(5, 100)
	first := g.ok("/v1/completions", completion(prompt))
	if r := g.post("/v1/explain", completion(prompt)); r.status != http.StatusNotFound {
		t.Errorf("explain for clients = %d %s, want 404", r.status, r.body)
	}
	if r := do(t, http.MethodGet, g.URL+"/metrics", nil); r.status != http.StatusNotFound {
		t.Errorf("metrics for clients = %d, want 404", r.status)
	}
	before := a.Stats().Requests + b.Stats().Requests
	for range 2 {
		r := do(t, http.MethodPost, "http://"+g.AdminAddr()+"/v1/explain", strings.NewReader(completion(prompt+"x")))
		var e explanation
		if err := json.Unmarshal([]byte(r.body), &e); err != nil || r.status != http.StatusOK {
			t.Fatalf("explain = %d %s", r.status, r.body)
		}
		if e.Replica != first.header.Get("X-Prefixgate-Replica") || e.Reason != "prefix" || e.PromptTokens == 0 || len(e.Candidates) != 2 ||
			e.Blocks != e.PromptTokens/16 || e.Policy != "least-ttft" || e.Endpoint != "completions" {
			t.Errorf("explain = %s", r.body)
		}
		for _, c := range e.Candidates {
			if c.Cost == nil || (c.MatchedTokens > 0) != (c.Replica == e.Replica) {
				t.Errorf("candidate %+v", c)
			}
		}
	}
	if after := a.Stats().Requests + b.Stats().Requests; after != before {
		t.Errorf("explaining sent %d requests", after-before)
	}
}

// 300 requests at once, a third canceled, with a replica that refuses them: no race, no mix-up, nothing left in flight.
func TestManyAtOnce(t *testing.T) {
	bad := startReplica(t, nil)
	c := testConfig(bad.URL(), startReplica(t, func(o *simhttp.Options) { o.Engine = sim.Options{PrefillRate: 1e6, DecodeRate: 2000} }).URL(),
		startReplica(t, func(o *simhttp.Options) { o.Engine = sim.Options{PrefillRate: math.Inf(1), DecodeRate: 1000} }).URL())
	g := start(t, c)
	bad.SetFault(simhttp.Fault{Kind: simhttp.FaultReset})
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%3 == 0 {
				time.AfterFunc(time.Duration(i%20)*time.Millisecond, cancel)
			}
			body := chat([]string{words(i%10, 30), "x", fmt.Sprintf("number %d", i)}, fmt.Sprintf(`,"max_tokens":20,"stream":%v`, i%2 == 0))
			req, _ := http.NewRequestWithContext(ctx, http.MethodPost, g.URL+"/v1/chat/completions", strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("X-Request-Id", fmt.Sprintf("id-%d", i))
			resp, err := client.Do(req)
			if err != nil {
				if i%3 != 0 {
					t.Errorf("request %d: %v", i, err)
				}
				return
			}
			defer resp.Body.Close()
			data, err := io.ReadAll(resp.Body)
			if i%3 != 0 && (err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("X-Request-Id") != fmt.Sprintf("id-%d", i)) {
				t.Errorf("request %d: %d, %v, %v: %s", i, resp.StatusCode, err, resp.Header, data)
			}
		})
	}
	wg.Wait()
	g.eventually("nothing is in flight", func() bool {
		for _, s := range g.fleet.AppendSnapshots(nil) {
			if s.InFlight != 0 || s.PrefillTokens != 0 {
				return false
			}
		}
		return g.metric("prefixgate_requests_in_flight") == 0
	})
	for i := range g.pending.shards {
		s := &g.pending.shards[i]
		s.mu.Lock()
		if len(s.flights) > 0 {
			t.Error("a prefix is still taken to be in flight")
		}
		s.mu.Unlock()
	}
}

// What a model's tokenizer cannot do is routed by load, counted with its reason; loading may fail where that is allowed.
func TestWithoutTokenizer(t *testing.T) {
	replicas := []string{startReplica(t, nil).URL(), startReplica(t, nil).URL()}
	c := testConfig(replicas...)
	c.Models = []config.Model{{Tokenizer: tokenize.Options{Model: t.TempDir()}, OnError: config.OnErrorLoadOnly}}
	g := start(t, c)
	seen := map[string]int{}
	for range 20 {
		seen[g.ok("/v1/completions", completion(words(1, 50))).header.Get("X-Prefixgate-Replica")]++
	}
	if len(seen) != 2 {
		t.Errorf("20 requests without a key went to %v, want both replicas", seen)
	}
	if n := g.metric(`prefixgate_load_only_total{reason="not_loaded"}`); n != 20 {
		t.Errorf("requests counted as not_loaded = %v, want 20", n)
	}

	c.Models[0].OnError = ""
	broken, err := New(Options{Config: c})
	if err != nil {
		t.Fatal(err)
	}
	if err := broken.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "models[0]") {
		t.Errorf("Run with a tokenizer that is not there = %v, want an error that names the model", err)
	}
}

// Adapters and salts keep prompts apart: nothing is predicted across them.
func TestAdaptersAndSaltsAreKeptApart(t *testing.T) {
	adapters := map[string]string{"lora-a": "/a", "lora-b": "/b"}
	g := start(t, testConfig(startReplica(t, func(o *simhttp.Options) { o.Adapters = adapters }).URL()))
	prompt := words(9, 60)
	quoted, _ := json.Marshal(prompt)
	for _, more := range []string{
		`"model":"prefixgate-demo"`, `"model":"lora-a"`, `"model":"lora-b"`, `"model":"prefixgate-demo","cache_salt":"s1"`, `"model":"prefixgate-demo","cache_salt":"s2"`,
	} {
		for turn := range 2 {
			a := g.ok("/v1/completions", fmt.Sprintf(`{%s,"prompt":%s,"max_tokens":2}`, more, quoted))
			matched := a.header.Get("X-Prefixgate-Matched-Tokens")
			if (matched == "0") != (turn == 0) {
				t.Errorf("%s, request %d: %s tokens matched", more, turn, matched)
			}
			if !strings.Contains(strings.ReplaceAll(a.body, " ", ""), `"cached_tokens":`+matched) {
				t.Errorf("%s, request %d: predicted %s, answer %s", more, turn, matched, a.body)
			}
		}
	}
}
