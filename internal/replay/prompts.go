package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/route"
)

// Encode returns the token ids of a request's prompt.
type Encode func(path string, body json.RawMessage) ([]uint32, error)

// promptLine is one line of a file of recorded prompts.
type promptLine struct {
	Timestamp    float64         `json:"timestamp"`
	Path         string          `json:"path"`
	Body         json.RawMessage `json:"body"`
	Prompt       json.RawMessage `json:"prompt"`
	Messages     json.RawMessage `json:"messages"`
	Session      string          `json:"session"`
	OutputLength int             `json:"output_length"`
}

// ReadPrompts reads recorded prompts: JSON lines with timestamp in milliseconds, and either body, a request body as it was sent to
// path (default /v1/chat/completions if it has messages, else /v1/completions), or directly prompt or messages. Optional are
// session, a key of the client's session, and output_length, the tokens of the answer; else the body's max_completion_tokens or
// max_tokens counts, else 128. encode gives the token ids; nil leaves prompts without blocks, fit for Live only.
func ReadPrompts(r io.Reader, blockTokens int, encode Encode) (*Trace, error) {
	t := &Trace{blockTokens: blockTokens}
	root := block.Scope{BlockTokens: blockTokens}.Root()
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 256<<20)
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		req, err := readPrompt(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		req.PromptTokens = max(1, len(req.Body)/4) // A guess, only without encode.
		if encode != nil {
			ids, err := encode(req.Path, req.Body)
			if err != nil {
				return nil, fmt.Errorf("line %d: tokenize: %w", n, err)
			}
			req.PromptTokens = max(1, len(ids))
			req.Chain = block.AppendChain(nil, root, ids, blockTokens, nil)
			req.TextPrefix = route.HashTokens(ids, prefixTokens)
			req.SimHash = route.SimHashOf(ids, len(ids))
		}
		t.Requests = append(t.Requests, req)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read prompts: %w", err)
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("read prompts: the file holds no request")
	}
	t.sort()
	return t, nil
}

func readPrompt(data []byte) (Request, error) {
	var line promptLine
	if err := json.Unmarshal(data, &line); err != nil {
		return Request{}, err
	}
	body := line.Body
	switch {
	case body != nil:
	case line.Messages != nil:
		body, _ = json.Marshal(map[string]json.RawMessage{"messages": line.Messages})
	case line.Prompt != nil:
		body, _ = json.Marshal(map[string]json.RawMessage{"prompt": line.Prompt})
	default:
		return Request{}, fmt.Errorf("want body, messages or prompt")
	}
	var fields struct {
		Messages      json.RawMessage `json:"messages"`
		MaxTokens     int             `json:"max_tokens"`
		MaxCompletion int             `json:"max_completion_tokens"`
	}
	if err := json.Unmarshal(body, &fields); err != nil {
		return Request{}, fmt.Errorf("body: %w", err)
	}
	req := Request{
		At:           time.Duration(line.Timestamp * float64(time.Millisecond)),
		OutputTokens: 128,
		Session:      route.HashSession(line.Session),
		Body:         append([]byte(nil), body...),
		Path:         line.Path,
	}
	for _, n := range []int{line.OutputLength, fields.MaxCompletion, fields.MaxTokens} {
		if n > 0 {
			req.OutputTokens = n
			break
		}
	}
	if req.Path == "" {
		req.Path = "/v1/completions"
		if fields.Messages != nil {
			req.Path = "/v1/chat/completions"
		}
	}
	return req, nil
}
