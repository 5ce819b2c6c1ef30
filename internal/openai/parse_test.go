package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

func mustParse(t *testing.T, ep Endpoint, body string) *Request {
	t.Helper()
	r, err := Parse(ep, []byte(body))
	if err != nil {
		t.Fatalf("Parse(%s, %s) = %v, want no error", ep, clip(body, 200), err)
	}
	return r
}

func TestParseReadsWhatDecides(t *testing.T) {
	body := ` {"model":"m\u0031","messages":[{"role":"user","content":"hi"}], "stream" : true,
		"stream_options":{"include_usage":true},"tools":[{"type":"function"}],"tool_choice":"auto",
		"documents":[{}],"chat_template_kwargs":{"enable_thinking":false},"reasoning_effort":"low",
		"add_generation_prompt":false,"continue_final_message":true,"add_special_tokens":true,
		"cache_salt":"s","truncate_prompt_tokens":-1,"user":"u","prompt_cache_key":"k","n":3,"seed":9007199254740993} `
	r := mustParse(t, Chat, body)
	for _, c := range []struct{ name, got, want string }{
		{"model", r.Model, "m1"},
		{"messages", string(r.Messages), `[{"role":"user","content":"hi"}]`},
		{"tools", string(r.Tools), `[{"type":"function"}]`},
		{"tool_choice", string(r.ToolChoice), `"auto"`},
		{"documents", string(r.Documents), `[{}]`},
		{"chat_template_kwargs", string(r.ChatTemplateKwargs), `{"enable_thinking":false}`},
		{"reasoning_effort", string(r.ReasoningEffort), `"low"`},
		{"cache_salt", r.CacheSalt, "s"},
		{"user", r.User, "u"},
		{"prompt_cache_key", r.PromptCacheKey, "k"},
		{"reason", string(r.LoadOnly), ""},
		{"body", string(r.Body), body},
	} {
		if c.got != c.want {
			t.Errorf("%s = %q, want %q", c.name, c.got, c.want)
		}
	}
	if !r.Stream || !r.IncludeUsage || r.N != 3 || *r.AddGenerationPrompt || !*r.ContinueFinalMessage || !*r.AddSpecialTokens || *r.TruncatePromptTokens != -1 {
		t.Errorf("Parse = %+v, want the flags and numbers of the body", r)
	}
}

// Elsewhere malformed JSON was answered with a 500, or its text ended up in the error.
func TestParseRefusesWhatIsNotAnObject(t *testing.T) {
	deep := strings.Repeat("[", 20000)
	for _, c := range []struct{ name, body, want string }{
		{"empty", "", "empty"},
		{"space", " \n", "empty"},
		{"null", "null", "not an object"},
		{"array", "[]", "not an object"},
		{"number", "42", "not an object"},
		{"string", `"canary"`, "not an object"},
		{"cut", `{"model":`, "too early"},
		{"cut in a string", `{"model":"canary`, "too early"},
		{"cut in an escape", `{"model":"canary\`, "too early"},
		{"cut in a unicode escape", `{"model":"canary\u12`, "too early"},
		{"cut before an end", `{"model":"canary"`, "too early"},
		{"trailing", `{"model":"canary"} x`, "follows"},
		{"two values", `{} {}`, "follows"},
		{"array and more", `[] []`, "follows"},
		{"nul", "\x00", "unexpected"},
		{"single quotes", `{'model':'canary'}`, "unexpected"},
		{"trailing comma", `{"model":"canary",}`, "unexpected"},
		{"trailing comma in array", `{"a":[1,]}`, "unexpected"},
		{"no colon", `{"model" "canary"}`, "unexpected"},
		{"comment", `{/*canary*/}`, "unexpected"},
		{"leading zero", `{"n":01}`, "unexpected"},
		{"bare minus", `{"n":-}`, "number"},
		{"bare point", `{"n":1.}`, "number"},
		{"bare exponent", `{"n":1e}`, "number"},
		{"control character", "{\"model\":\"canary\n\"}", "control"},
		{"control character in a long string", "{\"model\":\"canary 0123456789 0123456789\x1f 0123456789\"}", "control"},
		{"bad escape", `{"model":"canary\x"}`, "escape"},
		{"bad unicode escape", `{"model":"canary\u12g4"}`, "escape"},
		{"invalid utf-8", "{\"model\":\"canary\xff\"}", "UTF-8"},
		{"encoded surrogate", "{\"model\":\"canary\xed\xa0\x80\"}", "UTF-8"},
		{"deep arrays", `{"messages":` + deep, "deeply"},
		{"deep at the top", deep, "deeply"},
		{"deep objects", strings.Repeat(`{"a":`, 20000), "deeply"},
		{"deep in a part", `{"messages":[{"content":[{"type":` + deep, "deeply"},
		{"model of a wrong type", `{"model":7,"messages":"hi"}`, "model must be a string"},
		{"misspelt literal", `{"a":trve}`, "unexpected"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, ep := range []Endpoint{Chat, Completions, Other} {
				_, err := Parse(ep, []byte(c.body))
				var e *Error
				if !errors.As(err, &e) || e.Status != 400 || e.Type != TypeInvalidRequest {
					t.Fatalf("Parse(%s) = %v, want a 400", ep, err)
				}
				if !strings.Contains(e.Message, c.want) {
					t.Errorf("message = %q, want it to say %q", e.Message, c.want)
				}
				if strings.Contains(e.Message, "canary") {
					t.Errorf("message = %q, which repeats the body", e.Message)
				}
			}
		})
	}
}

// Elsewhere every shape but the plain string was a 500, or the gateway's schema was narrower than the engine's.
func TestParseLeavesValidationToTheEngine(t *testing.T) {
	for _, c := range []struct {
		ep   Endpoint
		body string
		want Reason
	}{
		{Chat, `{"model":"m","messages":[{"role":"user","content":"a"}]}`, ""},
		{Chat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}`, ""},
		{Chat, `{"messages":[{"role":"user","content":[]}]}`, ""},
		{Chat, `{"messages":[{"role":"user","content":{"type":"text"}}]}`, ""},
		{Chat, `{"messages":[{"role":"user"}]}`, ""},
		{Chat, `{"messages":[{"role":"tool","content":[{"type":"text","text":"a"}]},{"role":"developer","content":"x"}]}`, ""},
		{Chat, `{"messages":[{"content":["a"]}]}`, ""},
		{Chat, `{"messages":[]}`, ReasonNoPrompt},
		{Chat, `{"messages":null}`, ReasonNoPrompt},
		{Chat, `{}`, ReasonNoPrompt},
		{Chat, `{"messages":"hi"}`, ReasonBadField},
		{Chat, `{"messages":["hi"]}`, ReasonBadField},
		{Chat, `{"messages":[{}],"tools":{}}`, ReasonBadField},
		{Chat, `{"messages":[{}],"tools":null}`, ""},
		{Chat, `{"messages":[{}],"cache_salt":7}`, ReasonBadField},
		{Chat, `{"messages":[{}],"chat_template_kwargs":[]}`, ReasonBadField},
		{Chat, `{"messages":[{}],"add_generation_prompt":"maybe"}`, ReasonBadField},
		{Chat, `{"messages":[{}],"stream":[]}`, ReasonBadField},
		{Chat, `{"messages":[{}],"stream_options":7}`, ReasonBadField},
		{Chat, `{"messages":[{}],"n":0,"min_tokens":0,"response_format":{"type":"json_schema"},"x":[1,null,{"b":true}]}`, ""},
		{Chat, `{"messages":[{}],"n":"many"}`, ReasonBadField},
		{Chat, `{"messages":[{}],"chat_template":"x"}`, ReasonChatTemplate},
		{Chat, `{"messages":[{}],"chat_template_kwargs":{"chat_template":"x"}}`, ReasonChatTemplate},
		{Chat, `{"messages":[{}],"chat_template_kwargs":{"chat\u005ftemplate":"x"}}`, ReasonChatTemplate},
		{Chat, `{"messages":[{}],"chat_template":null}`, ""},
		{Chat, `{"messages":[{"content":"ok \ud800 bad"}]}`, ReasonSurrogate},
		{Chat, `{"messages":[{"content":"\udc00\ud800"}]}`, ReasonSurrogate},
		{Chat, `{"messages":[{"content":"\ud83d\ude00 \u0000 \ufeff"}]}`, ""},
		{Chat, `{"messages":[{}],"temperature":NaN}`, ReasonNonFinite},
		{Chat, `{"messages":[{}],"temperature":-Infinity}`, ReasonNonFinite},
		{Chat, "\xef\xbb\xbf" + `{"messages":[{}]}`, ""},
		{Completions, `{"prompt":"a"}`, ""},
		{Completions, `{"prompt":""}`, ReasonNoPrompt},
		{Completions, `{"prompt":[]}`, ReasonNoPrompt},
		{Completions, `{"prompt":[""]}`, ReasonNoPrompt},
		{Completions, `{"prompt":null}`, ReasonNoPrompt},
		{Completions, `{}`, ReasonNoPrompt},
		{Completions, `{"prompt":7}`, ReasonBadField},
		{Completions, `{"prompt":{}}`, ReasonBadField},
		{Completions, `{"prompt":[1,"a"]}`, ReasonBadField},
		{Completions, `{"prompt":["a",1]}`, ReasonBadField},
		{Completions, `{"prompt":[-1]}`, ReasonBadField},
		{Completions, `{"prompt":[1.5]}`, ReasonBadField},
		{Completions, `{"prompt":[4294967296]}`, ReasonBadField},
		{Completions, `{"prompt":[99999999999999999999999999]}`, ReasonBadField},
		{Completions, `{"prompt":[[1],["a"]]}`, ReasonBadField},
		{Completions, `{"prompt":[[1],2]}`, ReasonBadField},
		{Completions, `{"prompt":[null]}`, ReasonBadField},
		{Completions, `{"prompt":"a","prompt_embeds":"x"}`, ReasonEmbeds},
		{Embeddings, `{"input":[{"text":"a"}]}`, ReasonEndpoint},
		{Responses, `{"input":"x"}`, ReasonEndpoint},
		{Messages, `{"messages":"x"}`, ReasonEndpoint},
		{Other, `{}`, ReasonEndpoint},
	} {
		if got := mustParse(t, c.ep, c.body).LoadOnly; got != c.want {
			t.Errorf("Parse(%s, %s).LoadOnly = %q, want %q", c.ep, c.body, got, c.want)
		}
	}
}

func TestParsePrompts(t *testing.T) {
	for _, c := range []struct {
		prompt string
		want   []Prompt
	}{
		{`"a\n\u00e9\ud83d\ude00\"\\\/\b\f\r\t"`, []Prompt{{Text: "a\né😀\"\\/\b\f\r\t"}}},
		{`["one"]`, []Prompt{{Text: "one"}}},
		{`["one", "two\u0021"]`, []Prompt{{Text: "one"}, {Text: "two!"}}},
		{`[1, 2,4294967295]`, []Prompt{{Tokens: []uint32{1, 2, 4294967295}}}},
		{`[[1,2],[3]]`, []Prompt{{Tokens: []uint32{1, 2}}, {Tokens: []uint32{3}}}},
		{`"\ud800\u0041\ud800\ud83d\ude00x"`, []Prompt{{Text: "\ufffdA\ufffd😀x"}}},
	} {
		if got := mustParse(t, Completions, `{"prompt":`+c.prompt+`}`).Prompts; !reflect.DeepEqual(got, c.want) {
			t.Errorf("Prompts of %s = %+v, want %+v", c.prompt, got, c.want)
		}
	}
}

// Elsewhere two parsers on one path picked different values of a doubled key, so that one model was authorized and
// another one ran. The engine's parser takes the last.
func TestParseTakesTheLastOfDoubledKeys(t *testing.T) {
	r := mustParse(t, Chat, `{"model":"small","messages":[{"content":[{"type":"image_url","image_url":"x"}]}],"cache_salt":"a",
		"stream":false,"model":"big","messages":[{"content":"one","content":"two"}],"cache_salt":"b","stream":true,"Model":"exact","MODEL":"case"}`)
	if r.Model != "big" || r.CacheSalt != "b" || !r.Stream || string(r.Messages) != `[{"content":"one","content":"two"}]` || len(r.Images) != 0 || r.LoadOnly != "" {
		t.Errorf("Parse = model %q, salt %q, stream %v, messages %s, %d images, reason %q; want the last of each", r.Model, r.CacheSalt, r.Stream, r.Messages, len(r.Images), r.LoadOnly)
	}
	if r = mustParse(t, Chat, `{"model":7,"model":"ok","messages":7,"messages":[{}],"n":"x","n":null,"stream":true,"stream":null}`); r.Model != "ok" || r.LoadOnly != "" || r.N != 1 || r.Stream {
		t.Errorf("Parse = %+v, want the earlier values forgotten", r)
	}
	if r = mustParse(t, Chat, `{"messages":[{}],"messages":null,"m\u006fdel":"esc"}`); r.LoadOnly != ReasonNoPrompt || r.Model != "esc" {
		t.Errorf("Parse = %+v, want no messages and the model of the escaped key", r)
	}
	if _, err := Parse(Chat, []byte(`{"model":"ok","model":[]}`)); err == nil {
		t.Error("Parse of a last model of a wrong type = no error")
	}
	if r = mustParse(t, Completions, `{"prompt":"a","prompt":[1,2],"prompt":["x","y"]}`); len(r.Prompts) != 2 || r.Prompts[1].Text != "y" {
		t.Errorf("Prompts = %+v, want the last array's", r.Prompts)
	}
}

func TestParseIsAsLaxAboutTypesAsTheEngine(t *testing.T) {
	for in, want := range map[string]bool{`true`: true, `1`: true, `1.0`: true, `"true"`: true, `"On"`: true, `"yes"`: true, `false`: false, `0`: false, `"0"`: false, `null`: false, `"off"`: false} {
		if r := mustParse(t, Chat, `{"messages":[{}],"stream":`+in+`}`); r.Stream != want || r.LoadOnly != "" {
			t.Errorf("stream %s = %v (%q), want %v", in, r.Stream, r.LoadOnly, want)
		}
	}
	for _, in := range []string{`5`, `5.0`, `"5"`, `5e0`} {
		if r := mustParse(t, Chat, `{"messages":[{}],"truncate_prompt_tokens":`+in+`}`); r.TruncatePromptTokens == nil || *r.TruncatePromptTokens != 5 || r.LoadOnly != "" {
			t.Errorf("truncate_prompt_tokens %s = %v (%q), want 5", in, r.TruncatePromptTokens, r.LoadOnly)
		}
	}
	for _, in := range []string{`2`, `"maybe"`, `1.5`, `{}`} {
		if r := mustParse(t, Chat, `{"messages":[{}],"stream":`+in+`}`); r.LoadOnly != ReasonBadField {
			t.Errorf("stream %s gives reason %q, want %q", in, r.LoadOnly, ReasonBadField)
		}
	}
}

// Elsewhere requests that differ only in their picture counted as the same prompt.
func TestParseFindsImages(t *testing.T) {
	parse := func(parts string) []Image {
		t.Helper()
		return mustParse(t, Chat, `{"messages":[{"role":"system","content":"s"},{"role":"user","content":`+parts+`}]}`).Images
	}
	a := parse(`[{"type":"text","text":"t"},{"type":"image_url","image_url":{"url":"https://x/1.png","detail":"low"}}]`)
	if len(a) != 1 || a[0].Message != 1 || a[0].Part != 1 || a[0].Kind != KindImage {
		t.Fatalf("Images = %+v, want one image at message 1, part 1", a)
	}
	if b := parse(`[{"image_url":{"detail":"high","url":"https://x/1.png"},"type":"image_url"}]`); len(b) != 1 || b[0].Digest != a[0].Digest || b[0].Part != 0 {
		t.Errorf("Images = %+v, want the digest %x of the same URL", b, a[0].Digest)
	}
	if b := parse(`[{"type":"image_url","image_url":"https://x/1.png"}]`); len(b) != 1 || b[0].Digest != a[0].Digest {
		t.Errorf("Images = %+v, want the digest %x of the same URL as plain string", b, a[0].Digest)
	}
	seen := map[uint64]string{a[0].Digest: "first"}
	for _, part := range []string{
		`{"type":"image_url","image_url":{"url":"https://x/2.png"}}`,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}`,
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAB"}}`,
		`{"type":"video_url","video_url":{"url":"https://x/1.png"}}`,
		`{"type":"audio_url","audio_url":{"url":"https://x/1.png"}}`,
		`{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}`,
		`{"type":"image_url","image_url":{"url":"https://x/1.png"},"uuid":"u1"}`,
		`{"type":"image_url","image_url":null,"uuid":"u2"}`,
		`{"type":"image_url","image_url":null,"uuid":"u3"}`,
		`{"type":"something_new","payload":1}`,
		`{"type":"something_new","payload":2}`,
		`{"type":7}`,
	} {
		got := parse("[" + part + "]")
		if len(got) != 1 {
			t.Errorf("Images of %s = %+v, want one", part, got)
			continue
		}
		if other, dup := seen[got[0].Digest]; dup {
			t.Errorf("digest of %s equals that of %s", part, other)
		}
		seen[got[0].Digest] = part
	}
	if got := parse(`[{"type":"text","text":"a"},{"text":"b"},{"type":"refusal","refusal":"c"},"d",{}]`); len(got) != 0 {
		t.Errorf("Images of text parts = %+v, want none", got)
	}
	if got := parse(`[{"image_url":{"url":"u"}}]`); len(got) != 1 || got[0].Kind != KindImage {
		t.Errorf("Images of a part without type = %+v, want one", got)
	}
}

func TestPromptLogprobs(t *testing.T) {
	for _, c := range []struct {
		ep   Endpoint
		body string
		want bool
	}{
		{Completions, `{"prompt":"a","prompt_logprobs":0}`, true},
		{Completions, `{"prompt":"a","echo":true,"logprobs":1}`, true},
		{Completions, `{"prompt":"a","echo":false,"logprobs":1}`, false},
		{Completions, `{"prompt":"a","echo":true}`, false},
		{Chat, `{"messages":[{}],"prompt_logprobs":null}`, false},
		{Chat, `{"messages":[{}],"logprobs":true,"top_logprobs":2}`, false},
	} {
		if got := mustParse(t, c.ep, c.body).PromptLogprobs; got != c.want {
			t.Errorf("PromptLogprobs of %s = %v, want %v", c.body, got, c.want)
		}
	}
}

// FuzzParse compares with encoding/json, which differs in what it does with invalid UTF-8, a byte order mark, non-finite
// numbers and depth, and in nothing else.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`,
		`{"model":"\ud83d\ude00\ud800","prompt":["a","b\u0000"],"stream":true,"n":-1.5e+7}`,
		`{"prompt":[[1,2],[3]],"cache_salt":"x","cache_salt":"y"}`, `{"a":NaN}`, `[1,2`, `{"x":"0123456789abcdef\n"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		saved := bytes.Clone(body)
		for _, ep := range []Endpoint{Chat, Completions} {
			checkParse(t, ep, body)
		}
		if !bytes.Equal(saved, body) {
			t.Fatal("Parse changed the body")
		}
	})
}

func checkParse(t *testing.T, ep Endpoint, body []byte) {
	t.Helper()
	r, err := Parse(ep, body)
	var s scanner
	s.data = body
	s.space()
	s.value(maxDepth)
	var want map[string]json.RawMessage
	jerr := json.Unmarshal(body, &want)
	if err != nil {
		if jerr == nil && want != nil && utf8.Valid(body) && s.fail != failDepth && (len(want["model"]) == 0 || want["model"][0] == '"') {
			t.Fatalf("Parse = %v, encoding/json takes it", err)
		}
		return
	}
	if jerr != nil || want == nil {
		if !s.nonFinite && !bytes.HasPrefix(body, []byte("\xef\xbb\xbf")) {
			t.Fatalf("Parse takes it, encoding/json says %v", jerr)
		}
		return
	}
	str := func(name string) string {
		var v string
		if json.Unmarshal(want[name], &v) != nil {
			return ""
		}
		return v
	}
	if r.Model != str("model") || r.CacheSalt != str("cache_salt") || r.User != str("user") {
		t.Fatalf("Parse = model %q, salt %q, user %q; encoding/json has %q, %q, %q", r.Model, r.CacheSalt, r.User, str("model"), str("cache_salt"), str("user"))
	}
	for name, got := range map[string]json.RawMessage{"messages": r.Messages, "tools": r.Tools, "documents": r.Documents, "chat_template_kwargs": r.ChatTemplateKwargs} {
		w := want[name]
		if string(w) == "null" {
			w = nil
		}
		if string(got) != string(w) {
			t.Fatalf("%s = %s, encoding/json has %s", name, got, w)
		}
	}
	if ep != Completions || r.LoadOnly == ReasonBadField {
		return
	}
	var texts []string
	var one string
	var ids []uint32
	var lists [][]uint32
	var prompts []Prompt
	switch raw := want["prompt"]; {
	case len(raw) == 0 || string(raw) == "null":
	case json.Unmarshal(raw, &one) == nil:
		prompts = []Prompt{{Text: one}}
	case !bytes.Contains(raw, []byte("null")) && json.Unmarshal(raw, &texts) == nil:
		for _, s := range texts {
			prompts = append(prompts, Prompt{Text: s})
		}
	case json.Unmarshal(raw, &ids) == nil:
		prompts = []Prompt{{Tokens: ids}}
	case json.Unmarshal(raw, &lists) == nil:
		for _, l := range lists {
			prompts = append(prompts, Prompt{Tokens: l})
		}
	default:
		return
	}
	if !reflect.DeepEqual(r.Prompts, prompts) && len(r.Prompts)+len(prompts) > 0 && s.fail == "" {
		t.Fatalf("Prompts = %+v, encoding/json has %+v", r.Prompts, prompts)
	}
}

// Mutations of real bodies reach what a fuzzer finds only after a while.
func TestParseAgreesWithEncodingJSON(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	base := []string{
		`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}},{"type":"text","text":"a\nb"}]}],"stream":true}`,
		`{"model":"\ud83d\ude00 0123456789 abcdefgh","prompt":["a","b\u0000"],"stream":true,"n":-1.5e+7,"tools":[],"user":"u\\\""}`,
		`{"prompt":[[1,2],[3, 44 ]],"cache_salt":"x","cache_salt":"y" , "documents":null}`,
	}
	const alphabet = "{}[]\",:\\u0123456789abcdefntr-+.eE \n\x00\x1f\xff\xc3\xa9"
	for range 20_000 {
		b := []byte(base[rng.IntN(len(base))])
		for range 1 + rng.IntN(3) {
			i := rng.IntN(len(b))
			switch rng.IntN(4) {
			case 0:
				b[i] = alphabet[rng.IntN(len(alphabet))]
			case 1:
				b = append(b[:i], b[i+1:]...)
			case 2:
				b = append(b[:i], append([]byte{alphabet[rng.IntN(len(alphabet))]}, b[i:]...)...)
			case 3:
				j := i + rng.IntN(len(b)-i)
				b = append(b, b[i:j]...)
			}
			if len(b) == 0 {
				break
			}
		}
		checkParse(t, Chat, b)
		checkParse(t, Completions, b)
	}
}

func benchBody(n int) []byte {
	text := strings.Repeat("func main() {\n\tx := \"hello\" // wörld\n\treturn the quick brown fox jumps over the lazy dog\n}\n", 10)
	quoted, err := json.Marshal(text)
	if err != nil {
		panic(err)
	}
	var b bytes.Buffer
	b.WriteString(`{"model":"Qwen/Qwen3-8B","stream":true,"messages":[`)
	for i := 0; b.Len() < n; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"role":"user","content":%s}`, quoted)
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

func BenchmarkParse(b *testing.B) {
	for _, n := range []int{1_000, 400_000, 4_000_000} {
		body := benchBody(n)
		b.Run(fmt.Sprintf("chat/%dB", n), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(Chat, body); err != nil {
					b.Fatal(err)
				}
			}
		})
		image := []byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,` + strings.Repeat("QUJD", n/4) + `"}}]}]}`)
		b.Run(fmt.Sprintf("image/%dB", n), func(b *testing.B) {
			b.SetBytes(int64(len(image)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(Chat, image); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
