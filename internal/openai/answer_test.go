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
