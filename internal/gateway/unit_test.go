package gateway

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
	"prefixgate/internal/replica"
)

func TestPathPolicy(t *testing.T) {
	p := newPathPolicy([]string{"/inference/v1/generate", "/v1/load_lora_adapter"})
	for path, want := range map[string]pathClass{
		"/v1/embeddings": pathForwarded, "/v1/responses/resp_1": pathForwarded, "/v1/audio/transcriptions": pathForwarded,
		"/v1/messages/count_tokens": pathForwarded, "/tokenize": pathForwarded, "/detokenize": pathForwarded, "/rerank": pathForwarded,
		"/v1/rerank": pathForwarded, "/inference/v1/generate": pathForwarded, "/v1/load_lora_adapter": pathForwarded,

		"/": pathRefused, "/v1": pathRefused, "/v1/": pathRefused, "/v2/x": pathRefused, "/metrics": pathRefused, "/health": pathRefused,
		"/sleep": pathRefused, "/v1/sleep": pathRefused, "/pause": pathRefused, "/reset_prefix_cache": pathRefused, "/collective_rpc": pathRefused,
		"/v1/unload_lora_adapter": pathRefused, "/v1/UNLOAD_LoRA_adapter": pathRefused, "/v1/unload_lora_adapter/": pathRefused,
		"/V1/embeddings": pathRefused, "/v1/%75nload_lora_adapter": pathRefused, "/v1/x/../unload_lora_adapter": pathRefused,
		"/v1/./unload_lora_adapter": pathRefused, "/v1//unload_lora_adapter": pathRefused, "//sleep": pathRefused,
		"/v1/%2e%2e/sleep": pathRefused, "/v1/..%2fsleep": pathRefused, "/v1/..;/sleep": pathRefused, "/v1/x%00": pathRefused,
		"/v1/x%2funload_lora_adapter": pathRefused, `/v1/x\sleep`: pathRefused, "/tokenize/": pathRefused, "/tokenize/../sleep": pathRefused,
		"/v1/metrics": pathRefused, "/inference/v1/generate/": pathRefused,
	} {
		u, err := url.ParseRequestURI(path)
		if err != nil {
			t.Errorf("parse %q: %v", path, err)
			continue
		}
		if got := p.class(u); got != want {
			t.Errorf("class(%s) = %d, want %d", path, got, want)
		}
	}
}

// What a replica has done of the first prompt in its queue is not ahead of the next request, and idle time is not work done.
func TestCandidatesTellHowLongTheQueueHasBeenWorkedOn(t *testing.T) {
	x := &exchange{g: &Gateway{}, survey: newSurvey()}
	x.snapshots = []replica.Snapshot{
		{ID: replica.ID{Addr: "http://a"}, Healthy: true, PrefillTokens: 500, Prefills: 2, PrefillBegan: time.Now().Add(-time.Hour)},
		{ID: replica.ID{Addr: "http://b"}, Healthy: true, PrefillBegan: time.Now().Add(-time.Hour)},
	}
	x.look()
	if len(x.candidates) != 2 {
		t.Fatalf("%d candidates, want 2", len(x.candidates))
	}
	busy, idle := x.candidates[0], x.candidates[1]
	if busy.QueuedTokens != 500 || busy.QueuedPrompts != 2 || busy.QueueAge < time.Hour || busy.QueueAge > 2*time.Hour {
		t.Errorf("busy replica: %d tokens of %d prompts for %v, want 500 of 2 for an hour", busy.QueuedTokens, busy.QueuedPrompts, busy.QueueAge)
	}
	if idle.QueuedTokens != 0 || idle.QueuedPrompts != 0 || idle.QueueAge != 0 {
		t.Errorf("idle replica: %d tokens of %d prompts for %v, want none", idle.QueuedTokens, idle.QueuedPrompts, idle.QueueAge)
	}
}

func TestRequestIDs(t *testing.T) {
	for id, ok := range map[string]bool{
		"req-1": true, "0af7651916cd43dd8448eb211c80319c": true, "a/b:c=d@e+f_g.h": true, strings.Repeat("x", 128): true,
		"": false, strings.Repeat("x", 129): false, strings.Repeat("x", 10<<10): false, "a b": false, "a\nb": false, "a\tb": false, `a"b`: false, "ä": false, "a{b}": false,
	} {
		got := requestID(map[string][]string{requestIDHeader: {id}})
		if (got == id) != ok || !validRequestID(got) {
			t.Errorf("requestID(%q) = %q, want it kept: %v", id, got, ok)
		}
	}
	if a, b := requestID(nil), requestID(nil); a == b {
		t.Errorf("two requests got the id %s", a)
	}
	if got := requestID(map[string][]string{requestIDHeader: {"a", "b"}}); got == "a" || got == "b" {
		t.Errorf("requestID of two ids = %q, want a new one", got)
	}
}

// Only the value of model may change, whatever else the body holds.
func TestReplaceModelChangesNothingElse(t *testing.T) {
	for _, c := range []struct{ body, want string }{
		{`{"model":"a","seed":9007199254740993}`, `{"model":"b\"\u003c","seed":9007199254740993}`},
		{` { "x" : {"model":"no"}, "model" :  "a" , "temperature":1.0, "l":{"50256":-100.000}} `, ` { "x" : {"model":"no"}, "model" :  "b\"\u003c" , "temperature":1.0, "l":{"50256":-100.000}} `},
		{`{"model":"z","model":"a"}`, `{"model":"z","model":"b\"\u003c"}`},
		{`{"m\u006fdel":"a"}`, `{"m\u006fdel":"b\"\u003c"}`},
		{`{"messages":[{"content":"\"model\":\"a\""}],"model":"a"}`, `{"messages":[{"content":"\"model\":\"a\""}],"model":"b\"\u003c"}`},
		{"\xef\xbb\xbf{\"model\":\"a\"}", "\xef\xbb\xbf{\"model\":\"b\\\"\\u003c\"}"},
		{`{"Model":"a"}`, `{"Model":"a"}`},
		{`{}`, `{}`},
	} {
		if got := string(replaceModel([]byte(c.body), `b"<`)); got != c.want {
			t.Errorf("replaceModel(%s) = %s, want %s", c.body, got, c.want)
		}
	}
}

// FuzzJSONMember compares the walker with encoding/json on whatever is an object.
func FuzzJSONMember(f *testing.F) {
	for _, s := range []string{`{"a":1,"b":[1,{"a":2}],"a":"x\"y"}`, `{}`, `{"a":{}}`, `[1]`, `{"a" : null , "b":"\\"}`, `{"a":-1.5e3}`, "{", `{"a`, `{"a":`, `{"a":[}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		at, ok := jsonMember([]byte(s), "a") // must not panic or run away, whatever s is
		var want map[string]json.RawMessage
		if json.Unmarshal([]byte(s), &want) != nil || want == nil {
			return
		}
		if _, has := want["a"]; has != ok {
			t.Fatalf("jsonMember(%q) finds a: %v, want %v", s, ok, has)
		}
		if ok && string(at.of([]byte(s))) != string(want["a"]) {
			t.Fatalf("jsonMember(%q) = %q, want %q", s, at.of([]byte(s)), want["a"])
		}
	})
}

func TestFirstText(t *testing.T) {
	for _, c := range []struct {
		ep         openai.Endpoint
		body, want string
	}{
		{openai.Chat, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi \"you\""},{"role":"user","content":"x"}]}`, `hi "you"`},
		{openai.Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{}},{"type":"text","text":"b"}]}]}`, "ab"},
		{openai.Chat, `{"messages":[{"role":"assistant","content":"s"}]}`, ""},
		{openai.Completions, `{"prompt":["p","q"]}`, "p"},
		{openai.Completions, `{"prompt":[1,2]}`, ""},
	} {
		req, err := openai.Parse(c.ep, []byte(c.body))
		if err != nil {
			t.Fatal(err)
		}
		if got := firstText(req); got != c.want {
			t.Errorf("firstText(%s) = %q, want %q", c.body, got, c.want)
		}
	}
}

// What is being computed counts for its replica, as far as the prompts agree, and only until it ends. Compared with a plain
// list of all flights.
func TestPendingAgreesWithAList(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var p pending
	type entry struct {
		f     *flight
		id    replica.ID
		chain []block.Hash
	}
	var list []entry
	ids := []replica.ID{{Addr: "a"}, {Addr: "b"}, {Addr: "b", Start: 1}, {Addr: "c"}}
	chain := func() []block.Hash {
		tokens := make([]uint32, rng.IntN(12))
		for i := range tokens {
			tokens[i] = uint32(rng.IntN(2)) // many common prefixes
		}
		return block.AppendChain(nil, 1, tokens, 1, nil)
	}
	for range 5000 {
		switch rng.IntN(3) {
		case 0:
			id, c := ids[rng.IntN(len(ids))], chain()
			f := p.add(id, c)
			if (f == nil) != (len(c) == 0) {
				t.Fatalf("add of %d blocks = %v", len(c), f)
			}
			list = append(list, entry{f, id, c})
		case 1:
			if len(list) > 0 {
				i := rng.IntN(len(list))
				p.remove(list[i].f)
				p.remove(list[i].f)
				list = append(list[:i], list[i+1:]...)
			}
		default:
			c := chain()
			got := make([]int, len(ids))
			want := make([]int, len(ids))
			known := rng.IntN(3)
			for i := range got {
				got[i], want[i] = known, known
			}
			p.match(c, ids, got)
			for _, e := range list {
				n := 0
				for n < len(c) && n < len(e.chain) && c[n] == e.chain[n] {
					n++
				}
				for i, id := range ids {
					if id == e.id && n > want[i] {
						want[i] = n
					}
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("match of %d blocks = %v, want %v", len(c), got, want)
			}
		}
	}
}

func BenchmarkPending(b *testing.B) {
	tokens := make([]uint32, 100_000)
	chain := block.AppendChain(nil, 1, tokens, 16, nil)
	for _, n := range []int{1, 100, 2000} {
		b.Run(fmt.Sprintf("6250x%d", n), func(b *testing.B) {
			var p pending
			for i := range n {
				p.add(replica.ID{Addr: fmt.Sprint(i % 8)}, chain)
			}
			ids := make([]replica.ID, 8)
			for i := range ids {
				ids[i].Addr = fmt.Sprint(i)
			}
			dst := make([]int, 8)
			b.ReportAllocs()
			for b.Loop() {
				clear(dst)
				p.match(chain, ids, dst)
			}
		})
	}
}

// The catalog knows which names are one model, which are adapters, and keeps labels bounded.
func TestCatalog(t *testing.T) {
	base := func(id, root string) replica.Model { return replica.Model{ID: id, Root: root} }
	snapshots := []replica.Snapshot{
		{ID: replica.ID{Addr: "a"}, Models: []replica.Model{base("qwen", "Qwen/Qwen3-8B"), base("default", "Qwen/Qwen3-8B"), {ID: "lora-1", Parent: "qwen", Root: "/l1"}}},
		{ID: replica.ID{Addr: "b"}, Models: []replica.Model{base("qwen", "Qwen/Qwen3-8B"), base("default", "Qwen/Qwen3-8B")}},
	}
	var cs catalogs
	c := cs.of(snapshots)
	if c.only != "default" || c.silent {
		t.Errorf("only = %q, silent %v, want default: the first of its names", c.only, c.silent)
	}
	for name, want := range map[string]servedModel{
		"qwen":    {base: "default", root: "Qwen/Qwen3-8B", label: "qwen"},
		"default": {base: "default", root: "Qwen/Qwen3-8B", label: "default"},
		"lora-1":  {base: "default", adapter: "lora-1", root: "Qwen/Qwen3-8B", label: "lora-1"},
	} {
		if got := c.served[name]; got != want {
			t.Errorf("served[%s] = %+v, want %+v", name, got, want)
		}
	}
	if cs.of(snapshots) != c {
		t.Error("the catalog was built anew without a change")
	}
	if n := testing.AllocsPerRun(10, func() { cs.of(snapshots) }); n != 0 {
		t.Errorf("looking the catalog up allocates %v times, want 0", n)
	}
	snapshots[1].Models = []replica.Model{base("llama", "")}
	if d := cs.of(snapshots); d == c || d.only != "" || d.served["llama"].base != "llama" {
		t.Errorf("after a change: %+v", d)
	}
	var many []replica.Model
	for i := range 1000 {
		many = append(many, base(fmt.Sprintf("m%04d", i), ""))
	}
	cs = catalogs{configured: map[string]bool{"m0999": true}}
	c = cs.of([]replica.Snapshot{{Models: many}, {}})
	labels := map[string]bool{}
	for _, e := range c.served {
		labels[e.label] = true
	}
	if len(labels) != maxModelLabels+2 || !labels[labelOther] || !labels["m0999"] || !c.silent {
		t.Errorf("1000 models have %d labels, m0999 one: %v, want %d with it, and other", len(labels), labels["m0999"], maxModelLabels+2)
	}
}

func TestServes(t *testing.T) {
	s := replica.Snapshot{Models: []replica.Model{{ID: "a"}}}
	if !serves(&s, "a") || serves(&s, "b") || !serves(&s, "") || !serves(&replica.Snapshot{}, "b") {
		t.Error("serves is wrong about a replica's models")
	}
}
