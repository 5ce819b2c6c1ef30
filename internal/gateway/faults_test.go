package gateway

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/config"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/sim/simhttp"
)

// panicking is a policy with a fault.
type panicking struct{ route.Policy }

func (panicking) Pick(*route.Request, []route.Candidate) (route.Decision, bool) {
	panic("canary-panic: a part of a prompt")
}

// A fault of the gateway before anything was sent is a 500 in OpenAI's shape. What the panic says is not logged.
func TestPanicsBecomeErrors(t *testing.T) {
	g := start(t, testConfig(startReplica(t, nil).URL()))
	g.policy = panicking{g.policy}
	for range 3 {
		a := g.post("/v1/completions", completion("a"))
		var e struct{ Error struct{ Type string } }
		if json.Unmarshal([]byte(a.body), &e) != nil || a.status != http.StatusInternalServerError || e.Error.Type != "internal_error" {
			t.Errorf("a fault answers %d %s", a.status, a.body)
		}
	}
	g.eventually("the faults are counted", func() bool {
		return g.metric("prefixgate_panics_total") == 3 && g.metric("prefixgate_requests_in_flight") == 0
	})
	if log := g.log.String(); !strings.Contains(log, "panicking.Pick") || strings.Contains(log, "canary") {
		t.Errorf("the log wants the place of the fault and not its text:\n%s", log)
	}
	if n := g.metric(`prefixgate_requests_total{endpoint="completions",model="prefixgate-demo",outcome="panic"}`); n != 3 {
		t.Errorf("requests that ended with a fault = %v, want 3", n)
	}
}

// A replica that restarts at the same address has lost its cache: nothing is predicted of it.
func TestRestartedReplicaHasNothing(t *testing.T) {
	r := startReplica(t, nil)
	addr := r.Addr()
	g := start(t, testConfig(r.URL()))
	prompt := words(1, 100)
	g.ok("/v1/completions", completion(prompt))
	if a := g.ok("/v1/completions", completion(prompt)); a.header.Get("X-Prefixgate-Matched-Tokens") == "0" {
		t.Fatal("the second request matches nothing")
	}
	before := g.fleet.AppendSnapshots(nil)[0].ID
	r.Kill()
	startReplica(t, func(o *simhttp.Options) { o.Listen = addr })
	g.eventually("the restart is seen", func() bool {
		s := g.fleet.AppendSnapshots(nil)[0]
		return s.Healthy && s.ID != before && s.MetricsFresh
	})
	a := g.ok("/v1/completions", completion(prompt))
	if got := a.header.Get("X-Prefixgate-Matched-Tokens"); got != "0" || !strings.Contains(strings.ReplaceAll(a.body, " ", ""), `"cached_tokens":0`) {
		t.Errorf("after the restart %s tokens are predicted; answer %s", got, a.body)
	}
}

// A block size other than the configured one is shown, and the replica's own is used.
func TestBlockSizeMismatch(t *testing.T) {
	r := startReplica(t, func(o *simhttp.Options) { o.Engine.BlockTokens = 32 })
	c := testConfig(r.URL())
	c.Models[0].BlockTokens = 16
	g := start(t, c)
	prompt := words(1, 100)
	g.ok("/v1/completions", completion(prompt))
	a := g.ok("/v1/completions", completion(prompt))
	matched := a.header.Get("X-Prefixgate-Matched-Tokens")
	if matched == "0" || !strings.Contains(strings.ReplaceAll(a.body, " ", ""), `"cached_tokens":`+matched) {
		t.Errorf("predicted %s, answer %s", matched, a.body)
	}
	g.eventually("the mismatch is shown", func() bool { return g.metric(fmt.Sprintf("prefixgate_block_size_mismatch{replica=%q}", r.URL())) == 1 })
}

// Replicas of one model with different block sizes each get their own chain.
func TestMixedBlockSizes(t *testing.T) {
	a := startReplica(t, func(o *simhttp.Options) { o.Engine.BlockTokens = 32 })
	b := startReplica(t, nil)
	g := start(t, testConfig(a.URL(), b.URL()))
	for seed := range 8 {
		prompt := words(seed, 100)
		home := g.ok("/v1/completions", completion(prompt)).header.Get("X-Prefixgate-Replica")
		again := g.ok("/v1/completions", completion(prompt))
		matched := again.header.Get("X-Prefixgate-Matched-Tokens")
		if again.header.Get("X-Prefixgate-Replica") != home || matched == "0" || !strings.Contains(strings.ReplaceAll(again.body, " ", ""), `"cached_tokens":`+matched) {
			t.Errorf("prompt %d: went from %s to %s, predicted %s, answer %s", seed, home, again.header.Get("X-Prefixgate-Replica"), matched, again.body)
		}
	}
}

// Names that clients make up do not make series.
func TestSeriesAreBounded(t *testing.T) {
	g := start(t, testConfig(startReplica(t, nil).URL()))
	g.ok("/v1/completions", completion("a"))
	series := func() int { return strings.Count(do(t, http.MethodGet, g.URL+"/metrics", nil).body, "\n") }
	g.post("/v1/completions", `{"model":"first","prompt":"a"}`)
	g.post("/v1/first", `{"model":"first","prompt":"a"}`)
	g.post("/first", `{}`)
	before := series()
	for i := range 200 {
		g.post("/v1/completions", fmt.Sprintf(`{"model":"m%d","prompt":"a","user":"u%d"}`, i, i))
		g.post(fmt.Sprintf("/v1/x%d", i), fmt.Sprintf(`{"model":"m%d"}`, i))
		do(t, fmt.Sprintf("METHOD%d", i), fmt.Sprintf("%s/x%d", g.URL, i), nil)
	}
	if after := series(); after > before+10 {
		t.Errorf("lines of /metrics grew from %d to %d", before, after)
	}
}

// Only configured replicas are connected to, whatever a request says of hosts.
func TestRequestsCannotChooseWhereTheyGo(t *testing.T) {
	e := startEngine(t, oneModel, answerOK)
	trap, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer trap.Close()
	sprung := make(chan struct{}, 1)
	go func() {
		if conn, err := trap.Accept(); err == nil {
			conn.Close()
			sprung <- struct{}{}
		}
	}()
	g := start(t, testConfig(e.URL))
	body := completion("a")
	for _, head := range []string{
		"POST http://" + trap.Addr().String() + "/v1/completions HTTP/1.1\r\nHost: " + trap.Addr().String(),
		"POST /v1/completions HTTP/1.1\r\nHost: " + trap.Addr().String() + "\r\nX-Forwarded-Host: " + trap.Addr().String() + "\r\nX-Prefixgate-Replica: http://" + trap.Addr().String(),
		"CONNECT " + trap.Addr().String() + " HTTP/1.1\r\nHost: " + trap.Addr().String(),
	} {
		conn, err := net.Dial("tcp", g.Addr())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "%s\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", head, len(body), body)
		line, _ := bufio.NewReader(conn).ReadString('\n')
		conn.Close()
		if want := " 200 "; !strings.HasPrefix(head, "CONNECT") && !strings.Contains(line, want) {
			t.Errorf("%q: %q, want it served by the replica", head, line)
		}
	}
	if h := e.last(t).header; h.Get("X-Forwarded-Host") != trap.Addr().String() && h.Get("X-Prefixgate-Replica") != "" {
		t.Errorf("the replica got %v", h)
	}
	select {
	case <-sprung:
		t.Error("the gateway connected to a host that a request named")
	default:
	}
}

// HTTP/2 without TLS, where it is switched on; streams come piece by piece and a client's leaving reaches the replica.
func TestH2C(t *testing.T) {
	more, left := make(chan struct{}), make(chan struct{})
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/tokenize" {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for {
			io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
			w.(http.Flusher).Flush()
			select {
			case <-more:
			case <-r.Context().Done():
				close(left)
				return
			}
		}
	})
	c := testConfig(e.URL)
	c.Server.H2C = true
	g := start(t, c)
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, g.URL+"/v1/completions", strings.NewReader(completion("a", `,"stream":true`)))
	req.Header.Set("Content-Type", "application/json")
	resp, err := (&http.Client{Transport: h2}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.ProtoMajor != 2 || resp.StatusCode != http.StatusOK {
		t.Errorf("answered over %s with %d", resp.Proto, resp.StatusCode)
	}
	in := bufio.NewReader(resp.Body)
	for range 3 {
		if line, err := in.ReadString('\n'); err != nil || !strings.HasPrefix(line, "data: ") {
			t.Fatalf("event = %q, %v", line, err)
		}
		in.ReadString('\n')
		more <- struct{}{}
	}
	resp.Body.Close() // resets the stream
	select {
	case <-left:
	case <-time.After(20 * time.Second):
		t.Error("the replica goes on for nobody")
	}
	if a := g.post("/v1/models", ""); a.status != http.StatusMethodNotAllowed {
		t.Errorf("HTTP/1.1 beside it = %d", a.status)
	}
}

// Readiness asks nobody: with every replica and Redis hanging, both probes answer from what is known.
func TestProbesAskNobody(t *testing.T) {
	r := startReplica(t, nil)
	c := testConfig(r.URL())
	hole, err := net.Listen("tcp", "127.0.0.1:0") // accepts nothing
	if err != nil {
		t.Fatal(err)
	}
	defer hole.Close()
	c.Redis.URL = config.Secret("redis://" + hole.Addr().String())
	g := start(t, c)
	r.SetFault(simhttp.Fault{Kind: simhttp.FaultHang})
	for range 5 {
		for _, path := range []string{"/livez", "/readyz"} {
			if a := do(t, http.MethodGet, g.URL+path, nil); a.status != http.StatusOK {
				t.Errorf("%s = %d, %v", path, a.status, a.err)
			}
		}
	}
}

// The session policy's key comes from the header, the cookie or the body.
func TestSessionKeys(t *testing.T) {
	c := testConfig(startReplica(t, nil).URL(), startReplica(t, nil).URL(), startReplica(t, nil).URL())
	c.Route.Policy = route.Session
	c.Route.Session = route.SessionOptions{Header: "X-Chat", Cookie: "chat", Field: "chat"}
	g := start(t, c)
	where := map[string]int{}
	for session := range 40 {
		key := fmt.Sprintf("s%d", session)
		home := ""
		for i, header := range [][]string{{"X-Chat", key}, {"Cookie", "a=b; chat=" + key}, {}} {
			body := completion(words(session*10+i, 20))
			if len(header) == 0 {
				body = completion(words(session*10+i, 20), fmt.Sprintf(`,"chat":%q`, key))
			}
			a := g.ok("/v1/completions", body, header...)
			if got := a.header.Get("X-Prefixgate-Replica"); home != "" && got != home {
				t.Errorf("session %s went to %s, then to %s", key, home, got)
			} else {
				home = got
			}
			if got := a.header.Get("X-Prefixgate-Reason"); got != string(route.ReasonSession) {
				t.Errorf("session %s: reason %s", key, got)
			}
		}
		where[home]++
	}
	if len(where) != 3 {
		t.Errorf("40 sessions went to %v, want all three replicas", where)
	}
}

// Every policy serves requests of every kind.
func TestEveryPolicyServes(t *testing.T) {
	urls := []string{startReplica(t, nil).URL(), startReplica(t, nil).URL()}
	for _, policy := range route.Names() {
		c := testConfig(urls...)
		c.Route.Policy = policy
		g := start(t, c)
		g.ok("/v1/completions", completion(words(1, 50)))
		g.ok("/v1/chat/completions", chat([]string{"hello"}))
		g.ok("/v1/completions", `{"model":"prefixgate-demo","prompt":[1,2,3]}`)
		if a := g.post("/v1/completions", `{"model":"prefixgate-demo"}`); a.status != http.StatusBadRequest {
			t.Errorf("%s: no prompt = %d, want the engine's 400", policy, a.status)
		}
		g.end()
	}
}

// Several prompts in one request count together; a request for the prompt's own log probabilities reads no cache.
func TestSeveralPromptsAndPromptLogprobs(t *testing.T) {
	g := start(t, testConfig(startReplica(t, nil).URL(), startReplica(t, nil).URL()))
	cached := func(a reply) string {
		_, rest, _ := strings.Cut(strings.ReplaceAll(a.body, " ", ""), `"cached_tokens":`)
		n := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
		return rest[:max(n, 0)]
	}
	one, _ := json.Marshal(words(1, 60))
	two, _ := json.Marshal(words(2, 90))
	body := fmt.Sprintf(`{"model":"prefixgate-demo","max_tokens":2,"prompt":[%s,%s]}`, one, two)
	first := g.ok("/v1/completions", body)
	again := g.ok("/v1/completions", body)
	// The engine reports the cached tokens of the last prompt alone.
	predicted, _ := strconv.Atoi(again.header.Get("X-Prefixgate-Matched-Tokens"))
	reported, _ := strconv.Atoi(cached(again))
	if first.header.Get("X-Prefixgate-Matched-Tokens") != "0" || reported == 0 || predicted <= reported ||
		again.header.Get("X-Prefixgate-Replica") != first.header.Get("X-Prefixgate-Replica") {
		t.Errorf("two prompts: predicted %d, the engine says %d of the last", predicted, reported)
	}
	if n := g.metric(`prefixgate_cached_tokens_predictions_total{result="less"}`); n != 0 {
		t.Errorf("%v predictions for several prompts were judged by what the engine says of one", n)
	}
	single := g.ok("/v1/completions", fmt.Sprintf(`{"model":"prefixgate-demo","max_tokens":2,"prompt":[%s]}`, two))
	if got := single.header.Get("X-Prefixgate-Matched-Tokens"); got == "0" || got != cached(single) {
		t.Errorf("one of them alone: predicted %s, the engine says %s", got, cached(single))
	}
	logprobs := g.ok("/v1/completions", fmt.Sprintf(`{"model":"prefixgate-demo","max_tokens":2,"prompt":%s,"prompt_logprobs":1}`, two))
	if got := logprobs.header.Get("X-Prefixgate-Matched-Tokens"); got != "0" || cached(logprobs) != "0" {
		t.Errorf("prompt_logprobs: predicted %s, the engine says %s", got, cached(logprobs))
	}
}

// Without any replica in the configuration everything is a 503, not an unknown model.
func TestNoReplicas(t *testing.T) {
	c := testConfig()
	c.Server.StartupTimeout = time.Millisecond
	g := start(t, c)
	for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/embeddings"} {
		if a := g.post(path, `{"model":"prefixgate-demo","prompt":"a","messages":[]}`); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
			t.Errorf("%s = %d %s", path, a.status, a.body)
		}
	}
}

// Elsewhere one slow connect took the only replica out of rotation, and everybody got a 503 from a healthy fleet. A replica
// that passes its checks is asked where no other is left, and only there.
func TestTheLastReplicaIsAskedEvenIfEjected(t *testing.T) {
	one, two := startReplica(t, nil), startReplica(t, nil)
	c := testConfig(one.URL())
	c.Fleet.EjectMin = time.Minute
	g := start(t, c)
	g.fleet.ReportFailure(one.URL(), replica.FailureConnect)
	if s := g.fleet.AppendSnapshots(nil)[0]; s.Healthy || !s.Up {
		t.Fatalf("after a failed connect the replica is %+v, want ejected, but up", s)
	}
	g.ok("/v1/completions", completion(words(1, 50)))

	c = testConfig(one.URL(), two.URL())
	c.Fleet.EjectMin = time.Minute
	g = start(t, c)
	g.fleet.ReportFailure(one.URL(), replica.FailureConnect)
	for i := range 8 {
		if a := g.ok("/v1/completions", completion(words(2+i, 50)), "X-Prefixgate-Debug", "1"); a.header.Get("X-Prefixgate-Replica") != two.URL() {
			t.Errorf("request %d went to %s, which is ejected", i, a.header.Get("X-Prefixgate-Replica"))
		}
	}
}

// Nothing in the gateway queues streams: 600 at once all begin.
func TestManyStreams(t *testing.T) {
	release := make(chan struct{})
	e := startEngine(t, oneModel, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/tokenize" {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n")
		w.(http.Flusher).Flush()
		select {
		case <-release:
		case <-r.Context().Done():
			return
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})
	g := start(t, testConfig(e.URL))
	const n = 600
	begun := make(chan error, n)
	ended := make(chan string, n)
	for range n {
		go func() {
			req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, g.URL+"/v1/completions", strings.NewReader(completion("a", `,"stream":true`)))
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				begun <- err
				return
			}
			defer resp.Body.Close()
			in := bufio.NewReader(resp.Body)
			_, err = in.ReadString('\n')
			begun <- err
			rest, _ := io.ReadAll(in)
			ended <- string(rest)
		}()
	}
	for range n {
		if err := <-begun; err != nil {
			t.Fatal(err)
		}
	}
	if got := g.metric("prefixgate_requests_in_flight"); got != n {
		t.Errorf("in flight = %v, want %d", got, n)
	}
	close(release)
	for range n {
		if rest := <-ended; !strings.HasSuffix(rest, "data: [DONE]\n\n") {
			t.Fatalf("a stream ended with %q", rest)
		}
	}
}
