package openai

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"

	"prefixgate/internal/testenv"
)

const sse = "text/event-stream; charset=utf-8"

// scan reads answer in pieces that end at cuts and returns what was found and the index of the piece with the first token.
func scan(ep Endpoint, contentType, answer string, cuts ...int) (Answer, int) {
	s := NewAnswerScanner(ep, contentType, 1<<16)
	first, from := -1, 0
	for i, to := range append(cuts, len(answer)) {
		if s.Scan([]byte(answer[from:to])) {
			first = i
		}
		from = to
	}
	return s.End(), first
}

// events writes a stream with the given line end.
func events(eol string, data ...string) string {
	var b strings.Builder
	for _, d := range data {
		b.WriteString("data: " + d + eol + eol)
	}
	return b.String()
}

var stream = []string{
	`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`,
	`{"choices":[{"index":0,"delta":{"content":"print data: [DONE]\n\n now"},"finish_reason":null}]}`,
	`{"choices":[{"index":0,"delta":{"content":" \ud83d\ude00é"},"finish_reason":null}],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`,
	`{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}],"usage":null}`,
	`{"choices":[],"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3}}`,
	`[DONE]`,
}

var streamAnswer = Answer{
	Usage:    Usage{PromptTokens: 9, CompletionTokens: 3, CachedTokens: 4, CachedKnown: true},
	HasUsage: true, Text: []byte("print data: [DONE]\n\n now 😀é"), TextExact: true, Finish: "stop", Done: true,
}

// Elsewhere usage was lost, or false errors were logged, when an event spanned two reads, and a model that wrote the
// sentinel in its text ended the stream.
func TestWhereAStreamIsCutDoesNotMatter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, eol := range []string{"\n", "\r\n", "\r"} {
		answer := ": ping" + eol + eol + "event: message" + eol + "id: 1" + eol + events(eol, stream...)
		for at := range len(answer) {
			if got, _ := scan(Chat, sse, answer, at); !reflect.DeepEqual(got, streamAnswer) {
				t.Fatalf("eol %q cut at %d: got %+v", eol, at, got)
			}
		}
		every := make([]int, len(answer)-1)
		for i := range every {
			every[i] = i + 1
		}
		if got, _ := scan(Chat, sse, answer, every...); !reflect.DeepEqual(got, streamAnswer) {
			t.Errorf("eol %q byte by byte: got %+v", eol, got)
		}
		for range 200 {
			var cuts []int
			for at := rng.IntN(40); at < len(answer); at += rng.IntN(200) {
				cuts = append(cuts, at)
			}
			if got, _ := scan(Chat, sse, answer, cuts...); !reflect.DeepEqual(got, streamAnswer) {
				t.Fatalf("eol %q cuts %v: got %+v", eol, cuts, got)
			}
		}
	}
}

func TestTheFirstTokenIsNotTheRoleNorAPing(t *testing.T) {
	s := NewAnswerScanner(Chat, sse, 0)
	for i, piece := range []string{": ping\n\n", events("\n", stream[0]), "data: " + stream[1] + "\n", "\n", events("\n", stream[2])} {
		if got, want := s.Scan([]byte(piece)), i == 3; got != want {
			t.Errorf("piece %d: first token %v, want %v", i, got, want)
		}
	}
}

func TestWhatIsNotPlainTextIsNotExact(t *testing.T) {
	for name, data := range map[string][]string{
		"tool call":   {`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}`, `{"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}`, `[DONE]`},
		"reasoning":   {`{"choices":[{"index":0,"delta":{"reasoning":"hm"}}]}`, `{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`, `[DONE]`},
		"two choices": {`{"choices":[{"index":1,"delta":{"content":"x"},"finish_reason":"stop"}]}`, `[DONE]`},
		"cut":         {`{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`},
		"no finish":   {`{"choices":[{"index":0,"delta":{"content":"x"}}]}`, `[DONE]`},
		"an error":    {`{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}`, `{"error":{"message":"m","code":500}}`, `[DONE]`},
		"too long":    {`{"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 1<<16) + `"},"finish_reason":"stop"}]}`, `[DONE]`},
	} {
		if got, first := scan(Chat, sse, events("\n", data...)); got.TextExact || first != 0 {
			t.Errorf("%s: exact %v with first token in piece %d", name, got.TextExact, first)
		}
	}
}

// What is found must not depend on where the stream is cut, down to single bytes.
func TestKindsOfStreams(t *testing.T) {
	const role = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	const text = `data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}` + "\n\n"
	const finish = `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}` + "\n\n"
	const usage = `data: {"choices":[],"usage":{"prompt_tokens":49,"total_tokens":52,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":32}}}` + "\n\n"
	const done = "data: [DONE]\n\n"
	full := Usage{PromptTokens: 49, CompletionTokens: 3, CachedTokens: 32, CachedKnown: true}
	for _, c := range []struct {
		name  string
		ep    Endpoint
		in    string
		want  Answer
		first bool
	}{
		{"nothing", Chat, "", Answer{}, false},
		{"pings", Chat, ": ping\n\nevent: ping\nid: 7\n\n", Answer{}, false},
		{"role only", Chat, role, Answer{}, false},
		{"usual", Chat, role + text + finish + usage + done, Answer{Usage: full, HasUsage: true, Text: []byte("a"), TextExact: true, Finish: "stop", Done: true}, true},
		{"no space", Chat, "data:[DONE]\n\n", Answer{Done: true}, false},
		{"byte order mark", Chat, "\xef\xbb\xbf" + done, Answer{Done: true}, false},
		{"end mark in a comment", Chat, ": data: [DONE]\n\n", Answer{}, false},
		{"end mark in another field", Chat, "event: [DONE]\n\ndatax: [DONE]\n\n", Answer{}, false},
		{"data in several lines", Chat, "event: x\ndata: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"a\"}}]}\n\n" + done, Answer{Text: []byte("a"), Done: true}, true},
		{"ends without a text", Chat, finish + done, Answer{Finish: "stop", Done: true, TextExact: true}, true},
		{"not JSON", Chat, "data: hello\n\n", Answer{}, false},
		{"error", Chat, `data: {"error":{"message":"x"}}` + "\n\n" + done, Answer{Failed: true, Done: true}, false},
		{
			"usage in every event", Completions, `data: {"choices":[{"index":0,"text":"ue","finish_reason":null}],"usage":{"prompt_tokens":1,"completion_tokens":1}}` + "\n\n" +
				`data: {"choices":[{"index":0,"text":"la","finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}` + "\n\n" + done,
			Answer{Usage: Usage{PromptTokens: 1, CompletionTokens: 2}, HasUsage: true, Text: []byte("uela"), TextExact: true, Finish: "length", Done: true},
			true,
		},
		// Elsewhere the second half of Anthropic's usage replaced the first.
		{
			"Messages", Messages, "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":9,\"output_tokens\":1,\"cache_read_input_tokens\":32}}}\n\n" +
				"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n" +
				"event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":15}}\n\n" +
				"event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
			Answer{Usage: Usage{PromptTokens: 41, CompletionTokens: 15, CachedTokens: 32, CachedKnown: true}, HasUsage: true, Done: true},
			true,
		},
		{
			"Responses", Responses, "data: {\"type\":\"response.created\",\"response\":{\"usage\":null}}\n\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"a\"}\n\n" +
				"data: {\"type\":\"response.completed\",\"response\":{\"usage\":{\"input_tokens\":9,\"input_tokens_details\":{\"cached_tokens\":4},\"output_tokens\":3}}}\n\n",
			Answer{Usage: Usage{PromptTokens: 9, CompletionTokens: 3, CachedTokens: 4, CachedKnown: true}, HasUsage: true, Done: true},
			true,
		},
	} {
		every := make([]int, max(len(c.in)-1, 0))
		for i := range every {
			every[i] = i + 1
		}
		cuts := [][]int{nil, every}
		for i := range len(c.in) {
			cuts = append(cuts, []int{i})
		}
		for _, at := range cuts {
			got, first := scan(c.ep, sse, c.in, at...)
			if !reflect.DeepEqual(got, c.want) || (first >= 0) != c.first {
				t.Fatalf("%s, cut at %v: got %+v, first token %v; want %+v, %v", c.name, at, got, first >= 0, c.want, c.first)
			}
		}
	}
}

// What follows a line that is too long to be kept must be read as if nothing had been, wherever it is cut.
func TestAfterAHugeLineCutsDoNotMatter(t *testing.T) {
	huge := "data: " + strings.Repeat("x", maxEventBytes) + "data: [DONE]\n"
	rest := "\n" + events("\n", stream[:5]...)
	for _, at := range []int{0, 1, 2, 10, 60, 200, len(rest) - 1} {
		got, _ := scan(Chat, sse, huge+rest, len(huge)-20, len(huge)-14, len(huge)+at)
		if got.Done || got.Usage != streamAnswer.Usage || got.Finish != "stop" || got.TextExact {
			t.Errorf("cut at %d behind a huge line: %+v", at, got)
		}
	}
}

func FuzzAnswerScanner(f *testing.F) {
	f.Add(events("\r\n", stream...), uint16(20))
	f.Fuzz(func(t *testing.T, in string, cut uint16) {
		at := int(cut) % (len(in) + 1)
		for _, kind := range []string{sse, "application/json"} {
			a, _ := scan(Chat, kind, in)
			b, _ := scan(Chat, kind, in, at)
			if !reflect.DeepEqual(a, b) {
				t.Fatalf("whole %+v, cut at %d %+v", a, at, b)
			}
		}
	})
}

func TestHugeEventsAreBoundedAndPassedOver(t *testing.T) {
	s := NewAnswerScanner(Chat, sse, 1<<16)
	piece := []byte(strings.Repeat("x", 1<<20))
	s.Scan([]byte("data: "))
	for range 20 {
		s.Scan(piece)
	}
	if n := cap(s.line) + cap(s.data); n > 2*maxEventBytes {
		t.Errorf("the scanner holds %d bytes", n)
	}
	s.Scan([]byte("\n\n" + events("\n", stream...)))
	if got := s.End(); !got.Done || got.Usage != streamAnswer.Usage || got.TextExact {
		t.Errorf("after a huge event: %+v", got)
	}
}

func TestOtherContentTypesAreNotRead(t *testing.T) {
	for _, kind := range []string{"", "audio/wav", "text/plain", "application/x-ndjson", ";;"} {
		if got, first := scan(Chat, kind, events("\n", stream...)); !reflect.DeepEqual(got, Answer{}) || first != -1 {
			t.Errorf("content type %q: %+v", kind, got)
		}
	}
}

func TestBrokenAnswersDoNoHarm(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	whole := []byte(events("\n", stream...))
	for range 20_000 {
		b := append([]byte(nil), whole...)
		for range 1 + rng.IntN(5) {
			b[rng.IntN(len(b))] = byte(rng.IntN(256))
		}
		scan(Chat, sse, string(b))
		scan(Completions, "application/json", string(b[6:]))
	}
}

// The captures are of a real vLLM: what the scanner finds must be what encoding/json finds in the same bytes.
func TestCapturedAnswersAreRead(t *testing.T) {
	raw, err := os.ReadFile(testenv.Shared(t, "vllm/http_samples.json"))
	if err != nil {
		t.Fatal(err)
	}
	var samples []struct {
		Name    string `json:"name"`
		Request struct{ Path string }
		Status  int
		Headers map[string]string
		Body    any
	}
	if err := json.Unmarshal(raw, &samples); err != nil {
		t.Fatal(err)
	}
	read := 0
	for _, sample := range samples {
		ep := EndpointOf(sample.Request.Path)
		body, ok := sample.Body.(string)
		if !ok || (ep != Chat && ep != Completions) {
			continue
		}
		got, _ := scan(ep, sample.Headers["content-type"], body)
		if sample.Status != 200 {
			if got.Failed != strings.Contains(body, `"error"`) || got.HasUsage {
				t.Errorf("%s: %+v, want a failure", sample.Name, got)
			}
			continue
		}
		last := body
		if strings.HasPrefix(body, "data:") {
			for line := range strings.Lines(body) {
				if strings.Contains(line, `"usage":{`) {
					last = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
				}
			}
		}
		var want struct {
			Usage *struct {
				Prompt     int `json:"prompt_tokens"`
				Completion int `json:"completion_tokens"`
				Details    *struct {
					Cached *int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err := json.Unmarshal([]byte(last), &want); err != nil || want.Usage == nil {
			continue // a stream without usage
		}
		read++
		u := Usage{PromptTokens: want.Usage.Prompt, CompletionTokens: want.Usage.Completion}
		if d := want.Usage.Details; d != nil && d.Cached != nil {
			u.CachedTokens, u.CachedKnown = *d.Cached, true
		}
		if !got.Done || !got.HasUsage || got.Usage != u {
			t.Errorf("%s: got %+v, want usage %+v", sample.Name, got, u)
		}
	}
	if read < 5 {
		t.Errorf("only %d captured answers have a usage to compare", read)
	}
}

func BenchmarkAnswerScanner(b *testing.B) {
	event := []byte(events("\n", `{"id":"chatcmpl-90a0c4dca060a7a3","object":"chat.completion.chunk","created":1796088278,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`))
	for _, maxText := range []int{0, 1 << 20} {
		b.Run(fmt.Sprintf("text=%v", maxText > 0), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(event)))
			s := NewAnswerScanner(Chat, sse, maxText)
			for b.Loop() {
				s.Scan(event)
				if len(s.ans.Text) > 1<<19 {
					s.ans.Text = s.ans.Text[:0]
				}
			}
		})
	}
}
