package tokenize

import (
	"context"
	"errors"
	"fmt"

	"prefixgate/internal/openai"
)

// Difference is a prompt of the self-check for which the gateway and a replica do not have the same token ids.
type Difference struct {
	// Prompt names the built-in prompt.
	Prompt string
	// At is the index of the first id that differs.
	At int
	// Local and Remote are the numbers of ids.
	Local, Remote int
}

// String describes the difference without any text of a prompt.
func (d Difference) String() string {
	return fmt.Sprintf("%s: %d ids here, %d at the replica, unequal from the one at %d", d.Prompt, d.Local, d.Remote, d.At)
}

// checkPrompts are the prompts of the self-check: what chat templates and tokenizers differ in most.
var checkPrompts = [...]struct {
	name     string
	endpoint openai.Endpoint
	fields   string
}{
	{"plain completion", openai.Completions, `"prompt":"Hello, world! It's 12:30.\n\nNext line."`},
	{"completion without special tokens", openai.Completions, `"prompt":"The quick brown fox","add_special_tokens":false`},
	{"completion in several scripts", openai.Completions, `"prompt":"Привет, 世界! नमस्ते 👋🏽 e\u0301\t  x"`},
	{"chat of one message", openai.Chat, `"messages":[{"role":"user","content":"Hello!"}]`},
	{"chat of several turns", openai.Chat, `"messages":[{"role":"user","content":" What is 2+2? "},{"role":"assistant","content":"4\n"},{"role":"user","content":"And 3+3?"}]`},
	{"chat with a system message", openai.Chat, `"messages":[{"role":"system","content":"You are brief."},{"role":"user","content":"Hi"}]`},
	{"chat with text parts", openai.Chat, `"messages":[{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}]`},
	{"chat with a tool", openai.Chat, `"messages":[{"role":"user","content":"Weather in Oslo?"}],"tools":[{"type":"function","function":{"name":"get_weather","description":"Weather of a city, in °C.","parameters":{"type":"object","properties":{"city":{"type":"string"},"days":{"type":"integer","default":1}},"required":["city"]}}}]`},
}

// SelfCheck compares the gateway's token ids with those of a replica, asked by remote, for a few built-in prompts, and returns
// the prompts that differ. model is the name under which the replica serves the model. A prompt that one side refuses (a
// template without system messages, say) counts as equal if the other refuses it as well, and is passed over otherwise. The
// error is that of a replica that answered nothing at all.
func (m *Model) SelfCheck(ctx context.Context, remote Remote, model string) ([]Difference, error) {
	var differences []Difference
	var failure error
	equal, failed := 0, 0
	for _, p := range checkPrompts {
		if p.endpoint == openai.Chat && m.chat != placeLocal || p.endpoint == openai.Completions && m.completions != placeLocal {
			continue
		}
		req, err := openai.Parse(p.endpoint, []byte(`{"model":`+string(quote(model))+`,`+p.fields+`}`))
		if err != nil {
			panic("BUG: a built-in request does not parse: " + err.Error())
		}
		_, local, localErr := m.Explain(ctx, req)
		body := chatBody(req)
		if p.endpoint == openai.Completions {
			body = promptBody(req, req.Prompts[0].Text)
		}
		theirs, err := remote.Tokenize(ctx, body)
		switch {
		case err != nil && localErr != nil:
			equal++
		case err != nil || localErr != nil:
			failed++
			failure = errors.Join(err, localErr)
		default:
			if at := firstDifference(local, theirs); at >= 0 {
				differences = append(differences, Difference{Prompt: p.name, At: at, Local: len(local), Remote: len(theirs)})
			} else {
				equal++
			}
		}
	}
	m.metrics.selfCheck.WithLabelValues(m.opts.Name, "equal").Set(float64(equal))
	m.metrics.selfCheck.WithLabelValues(m.opts.Name, "different").Set(float64(len(differences)))
	m.metrics.selfCheck.WithLabelValues(m.opts.Name, "failed").Set(float64(failed))
	if equal == 0 && len(differences) == 0 && failure != nil {
		return nil, fmt.Errorf("self-check of the tokenizer: %w", failure)
	}
	return differences, nil
}

// firstDifference returns the first index at which a and b differ, or -1.
func firstDifference(a, b []uint32) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return n
	}
	return -1
}
