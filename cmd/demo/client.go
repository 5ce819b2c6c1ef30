package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// result is what became of one request.
type result struct {
	ttft time.Duration
	// prompt, cached and generated are tokens as the replica reports them.
	prompt, cached, generated int
	// counted and predicted are the prompt's tokens, and those expected to be cached, as the gateway says; -1 if it does not.
	counted, predicted int
	replica            string
	err                error
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// player sends a workload's requests, each conversation one after the other, all conversations at once.
type player struct {
	url, model string
	client     *http.Client
	// report is called after each request, one at a time.
	report func(result)
}

// play returns when every conversation has ended; results are those handed to report.
func (p *player) play(ctx context.Context, w *workload) []result {
	var (
		mu      sync.Mutex
		results []result
		wg      sync.WaitGroup
	)
	done := func(r result) {
		mu.Lock()
		defer mu.Unlock()
		results = append(results, r)
		p.report(r)
	}
	for i := range w.conversations {
		conv := &w.conversations[i]
		wg.Go(func() {
			if !pause(ctx, conv.begin) {
				return
			}
			messages := []message{{"system", w.systems[conv.system]}}
			for _, t := range conv.turns {
				if !pause(ctx, t.think) {
					return
				}
				messages = append(messages, message{"user", t.question})
				r, answer := p.ask(ctx, messages, t.maxTokens)
				if ctx.Err() != nil {
					return
				}
				done(r)
				if r.err != nil {
					return // The conversation cannot go on without the answer.
				}
				messages = append(messages, message{"assistant", answer})
			}
		})
	}
	wg.Wait()
	return results
}

// pause waits; it returns false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// event is as much of a streamed chunk as is needed.
type event struct {
	Choices []struct {
		Delta struct {
			Content string `json:"content"`
		} `json:"delta"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens     int `json:"prompt_tokens"`
		CompletionTokens int `json:"completion_tokens"`
		Details          struct {
			CachedTokens int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// ask sends one request and reads its stream to the end.
func (p *player) ask(ctx context.Context, messages []message, maxTokens int) (result, string) {
	r := result{counted: -1, predicted: -1}
	answer, err := p.stream(ctx, messages, maxTokens, &r)
	r.err = err
	return r, answer
}

func (p *player) stream(ctx context.Context, messages []message, maxTokens int, r *result) (string, error) {
	body, err := json.Marshal(map[string]any{
		"model": p.model, "messages": messages, "max_tokens": maxTokens, "stream": true,
		"stream_options": map[string]bool{"include_usage": true},
	})
	if err != nil {
		return "", fmt.Errorf("encode request: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Prefixgate-Debug", "1")
	start := time.Now()
	res, err := p.client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(res.Body, 500))
		return "", errors.Join(fmt.Errorf("status %d: %s", res.StatusCode, text), err)
	}
	r.replica = res.Header.Get("X-Prefixgate-Replica")
	r.counted = number(res.Header.Get("X-Prefixgate-Prompt-Tokens"))
	r.predicted = number(res.Header.Get("X-Prefixgate-Matched-Tokens"))
	var answer strings.Builder
	complete := false
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			complete = true
			continue
		}
		var ev event
		if err := json.Unmarshal([]byte(data), &ev); err != nil {
			return "", fmt.Errorf("decode chunk: %w", err)
		}
		if len(ev.Choices) > 0 && ev.Choices[0].Delta.Content != "" {
			if r.ttft == 0 {
				r.ttft = time.Since(start)
			}
			answer.WriteString(ev.Choices[0].Delta.Content)
		}
		if u := ev.Usage; u != nil {
			r.prompt, r.cached, r.generated = u.PromptTokens, u.Details.CachedTokens, u.CompletionTokens
		}
	}
	switch {
	case lines.Err() != nil:
		return "", fmt.Errorf("read stream: %w", lines.Err())
	case !complete || r.prompt == 0 || r.ttft == 0:
		return "", errors.New("the stream ended without its end")
	}
	return answer.String(), nil
}

// number reads a count from a header; -1 if there is none.
func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		return -1
	}
	return n
}
