package gateway

import (
	"net/http"
	"strings"
	"testing"

	"prefixgate/internal/sim/simhttp"
)

// The main job: what shares a prefix goes where the prefix is, and the engine finds what was predicted.
func TestPrefixesGoWhereTheyAre(t *testing.T) {
	if _, err := demoTokenizer(); err != nil {
		t.Fatal(err)
	}
	noLeaks(t)
	var urls []string
	for range 4 {
		urls = append(urls, startReplica(t, nil).URL())
	}
	g := start(t, testConfig(urls...))
	for seed := range 8 {
		prompt := words(seed, 400)
		first := g.ok("/v1/completions", completion(prompt))
		home := first.header.Get("X-Prefixgate-Replica")
		if home == "" || first.header.Get("X-Prefixgate-Matched-Tokens") != "0" {
			t.Fatalf("first request of prompt %d: headers %v, want a replica and no match", seed, first.header)
		}
		for range 3 {
			again := g.ok("/v1/completions", completion(prompt+" and more"))
			if got := again.header.Get("X-Prefixgate-Replica"); got != home {
				t.Errorf("prompt %d went to %s, want %s, which holds it", seed, got, home)
			}
			cached := `"cached_tokens":` + again.header.Get("X-Prefixgate-Matched-Tokens")
			if !strings.Contains(strings.ReplaceAll(again.body, " ", ""), cached) {
				t.Errorf("prompt %d: predicted %s, the engine says %s", seed, cached, again.body)
			}
		}
	}
	g.eventually("32 right predictions are counted", func() bool {
		return g.metric(`prefixgate_cached_tokens_predictions_total{result="equal"}`) == 32
	})
	g.end()
	transport.CloseIdleConnections()
}

// Headers that show a decision are shown to those who ask, and only where the configuration allows it.
func TestDecisionsAreShownOnRequestOnly(t *testing.T) {
	url := startReplica(t, nil).URL()
	shown := func(h http.Header) bool {
		for name := range h {
			if strings.HasPrefix(name, "X-Prefixgate-") {
				return true
			}
		}
		return false
	}
	g := start(t, testConfig(url))
	if a := g.ok("/v1/completions", completion("a"), "X-Prefixgate-Debug", ""); shown(a.header) {
		t.Errorf("nobody asked, but the answer has %v", a.header)
	}
	if a := g.ok("/v1/completions", completion("a")); !shown(a.header) {
		t.Errorf("asked for the decision, but the answer has %v", a.header)
	}
	c := testConfig(url)
	c.Server.DebugHeaders = false
	g = start(t, c)
	if a := g.ok("/v1/completions", completion("a")); shown(a.header) {
		t.Errorf("not allowed, but the answer has %v", a.header)
	}
}

// A replica that dies before its first byte costs the client nothing.
func TestDeadReplicaIsReplaced(t *testing.T) {
	a, b := startReplica(t, nil), startReplica(t, nil)
	g := start(t, testConfig(a.URL(), b.URL()))
	prompt := words(1, 200)
	home := g.ok("/v1/completions", completion(prompt)).header.Get("X-Prefixgate-Replica")
	dead, alive := a, b
	if home == b.URL() {
		dead, alive = b, a
	}
	dead.SetFault(simhttp.Fault{Kind: simhttp.FaultReset})
	for range 5 {
		again := g.ok("/v1/completions", completion(prompt))
		if got := again.header.Get("X-Prefixgate-Replica"); got != alive.URL() {
			t.Errorf("went to %s, want %s", got, alive.URL())
		}
	}
	dead.Kill()
	for range 5 {
		g.ok("/v1/completions", completion(words(2, 50)))
	}
}
