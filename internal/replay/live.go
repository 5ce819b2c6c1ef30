package replay

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

// LiveOptions say where a workload is sent.
type LiveOptions struct {
	// URL is the gateway's base URL, such as http://127.0.0.1:8080. Required.
	URL string
	// Model is the model's name in the requests; empty keeps what a recorded body says, and sends none otherwise.
	Model string
	// Token is sent as a bearer token if it is not empty.
	Token string
	// Vocabulary is the number of token ids that made-up prompts draw from, which the model must know. Default 30,000.
	Vocabulary int
	// MaxOutput cuts answers to so many tokens; 0 leaves the workload's lengths.
	MaxOutput int
	// Client sends the requests. Default: a client of its own, without a limit on connections.
	Client *http.Client
	// Progress, if set, is called with the number of requests that have ended, from one goroutine at a time.
	Progress func(requests int)
}

// LiveResult is what was measured. Times are in seconds.
type LiveResult struct {
	// Requests were sent; Failed had no complete answer, counted by what went wrong.
	Requests int            `json:"requests"`
	Failed   int            `json:"failed"`
	Failures map[string]int `json:"failures,omitempty"`
	// TTFT is the time to the first token of the answered requests, Duration the time from the first request to the last answer.
	TTFT     Distribution `json:"ttft_seconds"`
	Duration float64      `json:"duration_seconds"`
	// Late is how much later than planned a request was sent at most: if it is not small, this machine was too slow.
	Late float64 `json:"late_seconds"`
	// PromptTokens and CachedTokens are the replicas' counts, TokenHitRate their ratio. CacheReported is how many answers told.
	PromptTokens  int64   `json:"prompt_tokens"`
	CachedTokens  int64   `json:"cached_tokens"`
	CacheReported int     `json:"cache_reported"`
	TokenHitRate  float64 `json:"token_hit_rate"`
	// Predicted is how many answers told both the gateway's matched tokens (it shows them where its configuration allows debug
	// headers) and the replica's cached ones; MatchAgreement the part in which they are equal, OverPredicted and
	// UnderPredicted the tokens predicted too many and too few, as parts of the prompt tokens.
	Predicted      int     `json:"predicted"`
	MatchAgreement float64 `json:"match_agreement"`
	OverPredicted  float64 `json:"over_predicted"`
	UnderPredicted float64 `json:"under_predicted"`
	// Replicas and Reasons count answers by the gateway's debug headers.
	Replicas map[string]int `json:"replicas,omitempty"`
	Reasons  map[string]int `json:"reasons,omitempty"`

	ttfts     []float64
	predicted comparison
	counted   int64 // Prompt tokens of the predicted.
}

// Live sends the workload to a running gateway at the workload's own times and waits for all answers. It returns early, with what was
// measured so far and the context's error, if ctx ends; every request has then ended too. Failures of single
// requests are counted, not returned.
func Live(ctx context.Context, load Workload, opts LiveOptions) (*LiveResult, error) {
	if opts.Vocabulary == 0 {
		opts.Vocabulary = 30_000
	}
	if opts.Client == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.MaxIdleConnsPerHost = 1024
		defer t.CloseIdleConnections()
		opts.Client = &http.Client{Transport: t}
	}
	opts.URL = strings.TrimSuffix(opts.URL, "/")
	res := &LiveResult{Failures: make(map[string]int), Replicas: make(map[string]int), Reasons: make(map[string]int)}
	var mu sync.Mutex // Guards res.
	var wg sync.WaitGroup
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	blockTokens := load.BlockTokens()
send:
	for n := 0; ; n++ {
		r, ok := load.Next()
		if !ok {
			break
		}
		// Bodies are made before their time.
		path, body, err := liveBody(&r, n, blockTokens, &opts)
		if err != nil {
			return nil, fmt.Errorf("request %d: %w", n+1, err)
		}
		due := start.Add(r.At + r.Offset)
		timer.Reset(time.Until(due))
		select {
		case <-ctx.Done():
			break send
		case <-timer.C:
		}
		mu.Lock()
		res.Late = max(res.Late, time.Since(due).Seconds())
		mu.Unlock()
		wg.Go(func() {
			a := ask(ctx, path, body, &opts)
			mu.Lock()
			defer mu.Unlock()
			res.add(&a)
			if opts.Progress != nil {
				opts.Progress(res.Requests)
			}
		})
	}
	wg.Wait()
	res.Duration = time.Since(start).Seconds()
	res.finish()
	return res, ctx.Err()
}

// answer is what came back for one request.
type answer struct {
	failure        string // A short kind, "" if complete.
	ttft           time.Duration
	prompt, cached int
	reported       bool
	matched        int // -1 if the gateway does not tell.
	replica        string
	reason         string
}

func (r *LiveResult) add(a *answer) {
	r.Requests++
	if a.replica != "" {
		r.Replicas[a.replica]++
		r.Reasons[a.reason]++
	}
	if a.failure != "" {
		r.Failed++
		r.Failures[a.failure]++
		return
	}
	r.ttfts = append(r.ttfts, a.ttft.Seconds())
	r.PromptTokens += int64(a.prompt)
	if !a.reported {
		return
	}
	r.CacheReported++
	r.CachedTokens += int64(a.cached)
	if a.matched < 0 {
		return
	}
	r.Predicted++
	r.counted += int64(a.prompt)
	r.predicted.add(a.matched, a.cached)
}

func (r *LiveResult) finish() {
	r.TTFT = distribution(r.ttfts)
	r.TokenHitRate = ratio(r.CachedTokens, r.PromptTokens)
	r.MatchAgreement = ratio(int64(r.predicted.right), int64(r.Predicted))
	r.OverPredicted, r.UnderPredicted = ratio(r.predicted.over, r.counted), ratio(r.predicted.under, r.counted)
}

// liveBody makes the HTTP body of a request: the recorded one, streamed and with usage, or a completion of made-up token ids in which
// equal blocks of the workload are equal tokens.
func liveBody(r *Request, n, blockTokens int, opts *LiveOptions) (path string, body []byte, err error) {
	fields := make(map[string]any)
	path = r.Path
	if r.Body != nil {
		recorded := make(map[string]json.RawMessage)
		if err := json.Unmarshal(r.Body, &recorded); err != nil {
			return "", nil, fmt.Errorf("body: %w", err)
		}
		for k, v := range recorded {
			fields[k] = v
		}
	} else {
		path = "/v1/completions"
		fields["prompt"] = madeUpTokens(r, n, blockTokens, opts.Vocabulary)
		fields["ignore_eos"] = true
	}
	output := r.OutputTokens
	if opts.MaxOutput > 0 {
		output = min(output, opts.MaxOutput)
	}
	delete(fields, "max_completion_tokens")
	fields["max_tokens"] = output
	fields["stream"] = true
	fields["stream_options"] = map[string]bool{"include_usage": true}
	if opts.Model != "" {
		fields["model"] = opts.Model
	}
	body, err = json.Marshal(fields)
	return path, body, err
}

// madeUpTokens returns a prompt of the request's length: each block's tokens follow from its hash, those of the last, partial one from
// the request's number.
func madeUpTokens(r *Request, n, blockTokens, vocabulary int) []uint32 {
	tokens := make([]uint32, 0, r.PromptTokens)
	// The lowest ids are often special tokens.
	id := func(h uint64, i int) uint32 { return uint32(100 + mix(h^uint64(i))%uint64(max(1, vocabulary-100))) }
	for _, h := range r.Chain {
		for i := range blockTokens {
			tokens = append(tokens, id(uint64(h), i))
		}
	}
	own := mix(uint64(n) ^ 0x6f776e)
	for len(tokens) < r.PromptTokens {
		tokens = append(tokens, id(own, len(tokens)))
	}
	return tokens
}

// ask sends one request and reads its stream to the end.
func ask(ctx context.Context, path string, body []byte, opts *LiveOptions) answer {
	a := answer{matched: -1}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, opts.URL+path, bytes.NewReader(body))
	if err != nil {
		a.failure = "request"
		return a
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Prefixgate-Debug", "1")
	if opts.Token != "" {
		req.Header.Set("Authorization", "Bearer "+opts.Token)
	}
	start := time.Now()
	res, err := opts.Client.Do(req)
	if err != nil {
		a.failure = "connection"
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			a.failure = "canceled"
		}
		return a
	}
	defer res.Body.Close()
	a.replica, a.reason = res.Header.Get("X-Prefixgate-Replica"), res.Header.Get("X-Prefixgate-Reason")
	if n, err := strconv.Atoi(res.Header.Get("X-Prefixgate-Matched-Tokens")); err == nil {
		a.matched = n
	}
	if res.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, io.LimitReader(res.Body, 64<<10)) // So that the connection can be used again.
		a.failure = "status " + strconv.Itoa(res.StatusCode)
		return a
	}
	a.read(res.Body, start)
	return a
}

// chunk is as much of a streamed chunk as is needed.
type chunk struct {
	Choices []struct {
		Text  string `json:"text"`
		Delta struct {
			Content   string          `json:"content"`
			Reasoning string          `json:"reasoning_content"`
			ToolCalls json.RawMessage `json:"tool_calls"`
		} `json:"delta"`
		FinishReason *string `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		PromptTokens int `json:"prompt_tokens"`
		Details      *struct {
			CachedTokens *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
	Error json.RawMessage `json:"error"`
}

func (a *answer) read(body io.Reader, start time.Time) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 16<<20)
	done := false
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			done = true
			continue
		}
		var c chunk
		if err := json.Unmarshal(data, &c); err != nil {
			a.failure = "malformed chunk"
			return
		}
		if len(c.Error) > 0 && string(c.Error) != "null" {
			a.failure = "error in stream"
			return
		}
		for _, ch := range c.Choices {
			if a.ttft == 0 && (ch.Text != "" || ch.Delta.Content != "" || ch.Delta.Reasoning != "" || len(ch.Delta.ToolCalls) > 0 || ch.FinishReason != nil) {
				a.ttft = time.Since(start)
			}
		}
		if u := c.Usage; u != nil {
			a.prompt = u.PromptTokens
			if u.Details != nil && u.Details.CachedTokens != nil {
				a.cached, a.reported = *u.Details.CachedTokens, true
			}
		}
	}
	switch {
	case lines.Err() != nil || !done:
		a.failure = "broken stream"
	case a.ttft == 0:
		a.failure = "no token"
	}
}
