package simhttp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
	"prefixgate/internal/sim"
	"prefixgate/internal/tokenize"
)

// fingerprint is the system_fingerprint of answers; it does not pretend to be an engine's.
const fingerprint = "vllmsim-" + Version

// params are the fields of a request that only the engine reads.
type params struct {
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           int             `json:"min_tokens"`
	IgnoreEOS           bool            `json:"ignore_eos"`
	Stop                stopList        `json:"stop"`
	Temperature         *float64        `json:"temperature"`
	N                   *int            `json:"n"`
	CacheSalt           *string         `json:"cache_salt"`
	ChatTemplate        *string         `json:"chat_template"`
	ReturnTokenIDs      bool            `json:"return_token_ids"`
	Prompt              json.RawMessage `json:"prompt"`
	StreamOptions       *struct {
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
}

// stopList is a string or a list of strings.
type stopList []string

func (l *stopList) UnmarshalJSON(raw []byte) error {
	var one string
	if json.Unmarshal(raw, &one) == nil {
		if one != "" {
			*l = stopList{one}
		}
		return nil
	}
	return json.Unmarshal(raw, (*[]string)(l))
}

// sequence is one answer of a call: every choice of every prompt is one.
type sequence struct {
	prompt int
	answer answer
	// tool is the call that the answer is; nil for text.
	tool *toolCall
	// tokens are generated so far, of whose prompt cached came from the cache.
	tokens, cached int
	done           bool
}

// call is one inference request.
type call struct {
	req     *openai.Request
	params  params
	id      string
	model   string // as the client named it
	adapter string
	created int64
	prompts []tokenize.Prompt
	n       int
	seqs    []sequence
	named   bool // tool_choice names a function

	job *job
	// ids are the engine's, consecutive, one for each of seqs; submitted is when, in the engine's time.
	ids       []uint64
	submitted time.Duration
}

func (s *Server) chat(w http.ResponseWriter, r *http.Request) { s.infer(w, r, openai.Chat) }
func (s *Server) completions(w http.ResponseWriter, r *http.Request) {
	s.infer(w, r, openai.Completions)
}

func (s *Server) infer(w http.ResponseWriter, r *http.Request, ep openai.Endpoint) {
	s.requests.Add(1)
	s.inFlight.Add(1)
	defer s.inFlight.Add(-1)
	body, err := readBody(w, r)
	if err != nil {
		return // The client left while sending, or sent too much.
	}
	fault := *s.fault.Load()
	switch fault.Kind {
	case FaultReset:
		reset(w)
		return
	case FaultUnavailable:
		writeError(w, &apiError{status: http.StatusServiceUnavailable, typ: "ServiceUnavailableError", message: "the simulated replica was told to fail"})
		return
	case FaultNone, FaultHang, FaultCut, FaultUnhealthy:
	}
	c, err := s.prepare(r, ep, body)
	if err != nil {
		writeError(w, err)
		return
	}
	s.useAdapter(c.adapter, 1)
	defer s.useAdapter(c.adapter, -1)
	err = s.submit(c)
	defer func() {
		for range s.live.abort(c.ids) {
			s.metrics.finished.WithLabelValues("0", "abort", s.opts.Model).Inc()
		}
	}()
	if err != nil {
		writeError(w, err)
		return
	}
	if c.req.Stream {
		err = s.stream(w, r, c, fault)
	} else {
		err = s.collect(w, r, c)
	}
	if err != nil && r.Context().Err() != nil {
		s.disconnects.Add(1)
	}
}

// prepare reads and checks a request, and makes up its answers.
func (s *Server) prepare(r *http.Request, ep openai.Endpoint, body []byte) (*call, error) {
	c := &call{created: time.Now().Unix(), job: newJob()}
	if err := s.read(r, c, ep, body); err != nil {
		return nil, err
	}
	if err := s.check(c); err != nil {
		return nil, err
	}
	enc, err := s.encode(r.Context(), c.req)
	if err != nil {
		return nil, err
	}
	c.prompts = enc.Prompts
	prefix := "cmpl-"
	if ep == openai.Chat {
		prefix = "chatcmpl-"
	}
	if id := r.Header.Get("X-Request-Id"); id != "" {
		c.id = prefix + id
	} else {
		c.id = fmt.Sprintf("%s%016x", prefix, mixID(s.opts.Seed, uint64(s.started.UnixNano()), s.sequence.Add(1)))
	}
	return c, s.compose(r.Context(), c)
}

// read parses the body.
func (s *Server) read(r *http.Request, c *call, ep openai.Endpoint, body []byte) error {
	if ct, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); strings.TrimSpace(strings.ToLower(ct)) != "application/json" {
		return invalid("", "Unsupported Media Type: Only 'application/json' is allowed")
	}
	if err := json.Unmarshal(body, &c.params); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			at := fmt.Sprintf("body.%d", max(syntax.Offset-1, 0))
			return invalid(at, fmt.Sprintf("{'type': 'json_invalid', 'loc': '%s', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}", at))
		}
		loc := "body"
		if typ, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && typ.Field != "" {
			loc += "." + typ.Field
		}
		return invalid(loc, fmt.Sprintf("{'type': 'type_error', 'loc': '%s', 'msg': 'Input should be of another type'}", loc))
	}
	req, err := openai.Parse(ep, body)
	if err != nil {
		return invalid("body", "{'type': 'value_error', 'loc': 'body', 'msg': 'Input is not valid'}")
	}
	c.req = req
	missing := ""
	switch {
	case ep == openai.Chat && req.Messages == nil:
		missing = "messages"
	case ep == openai.Completions && (c.params.Prompt == nil || string(c.params.Prompt) == `""` || string(c.params.Prompt) == "null"):
		return badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
	}
	if missing != "" {
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(body, &fields); err != nil {
			return invalid("body", "{'type': 'dict_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary'}")
		}
		return invalid("body."+missing, fmt.Sprintf("{'type': 'missing', 'loc': 'body.%s', 'msg': 'Field required', 'input': '<dict of %d items>'}", missing, len(fields)))
	}
	return nil
}

// check refuses what vLLM refuses, in its words.
func (s *Server) check(c *call) error {
	p := &c.params
	c.model = c.req.Model
	switch _, isAdapter := s.opts.Adapters[c.model]; {
	case c.model == "":
		c.model = s.opts.Model
	case isAdapter:
		c.adapter = c.model
	case c.model != s.opts.Model && !slices.Contains(s.opts.Aliases, c.model):
		return &apiError{
			status: http.StatusNotFound, typ: "NotFoundError", param: "model",
			message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", c.model, strings.Join(append([]string{s.opts.Model}, s.opts.Aliases...), ", ")),
		}
	}
	c.n = c.req.N
	switch {
	case p.Temperature != nil && *p.Temperature < 0:
		t := pythonFloat(*p.Temperature)
		return badRequest("temperature", "temperature must be non-negative, got %s. (parameter=temperature, value=%s)", t, t)
	case p.CacheSalt != nil && *p.CacheSalt == "":
		return badRequest("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)")
	case c.n < 1:
		return badRequest("n", "n must be at least 1, got %d.", c.n)
	case c.n > 128:
		return badRequest("n", "n must be at most 128, got %d.", c.n)
	case c.req.ChatTemplate:
		return badRequest("", "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request with untrusted chat template.")
	case len(c.req.Images) > 0 && !s.opts.Multimodal:
		return badRequest("", "%s is not a multimodal model", s.opts.Model)
	}
	for _, limit := range []*int{p.MaxCompletionTokens, p.MaxTokens} {
		if limit != nil && *limit < 1 {
			return badRequest("max_tokens", "max_tokens must be at least 1, got %d. (parameter=max_tokens, value=%d)", *limit, *limit)
		}
	}
	if c.req.Endpoint == openai.Chat && emptyList(c.req.Messages) {
		return badRequest("", "Cannot apply chat template to an empty conversation. Provide at least one message.")
	}
	return nil
}

// encode tokenizes a request's prompts, in vLLM's words where it cannot.
func (s *Server) encode(ctx context.Context, req *openai.Request) (tokenize.Encoded, error) {
	if req.Endpoint == openai.Chat && req.ContinueFinalMessage != nil && *req.ContinueFinalMessage && (req.AddGenerationPrompt == nil || *req.AddGenerationPrompt) {
		return tokenize.Encoded{}, badRequest("", "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want the model to continue the final message, and add_generation_prompt when you want to add a header that will prompt it to start a new assistant message instead.")
	}
	enc, err := s.opts.Tokenizer.Encode(ctx, req)
	if err != nil {
		if ctx.Err() != nil {
			return enc, ctx.Err()
		}
		return enc, badRequest("", "the prompt cannot be tokenized: %v", err)
	}
	if len(enc.Prompts) == 0 {
		return enc, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
	}
	vocab, err := s.vocabulary(req)
	if err != nil {
		return enc, err
	}
	for i, p := range enc.Prompts {
		n := len(p.IDs)
		if vocab > 0 && i < len(req.Prompts) {
			for _, id := range req.Prompts[i].Tokens {
				if id >= vocab {
					return enc, badRequest("", "Token id %d is out of vocabulary", id)
				}
			}
		}
		given := i < len(req.Prompts) && req.Prompts[i].Tokens != nil
		switch {
		case n == 0:
			return enc, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
		case n >= s.opts.MaxModelLen && given:
			return enc, s.tooLong(n, "")
		case n >= s.opts.MaxModelLen:
			// Text is cut at one token more than can be served, so its length is not known.
			return enc, s.tooLong(s.opts.MaxModelLen+1, "at least ")
		}
	}
	return enc, nil
}

// vocabulary returns the number of token ids if the request holds any that must be checked, else 0.
func (s *Server) vocabulary(req *openai.Request) (uint32, error) {
	for i := range req.Prompts {
		if len(req.Prompts[i].Tokens) > 0 && s.opts.TokenizerFile != "" {
			d, err := s.detokenizer()
			if err != nil {
				return 0, err
			}
			return d.VocabSize(), nil
		}
	}
	return 0, nil
}

func (s *Server) tooLong(tokens int, atLeast string) error {
	return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains %s%d input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. (parameter=input_tokens, value=%d)",
		s.opts.MaxModelLen, atLeast, tokens, tokens)
}

// compose makes up the answers.
func (s *Server) compose(ctx context.Context, c *call) error {
	p := &c.params
	function, args := pickTool(c.req.Tools, c.req.ToolChoice, s.opts.Seed)
	c.named = len(c.req.ToolChoice) > 0 && c.req.ToolChoice[0] == '{'
	for i, prompt := range c.prompts {
		w := wish{limit: s.opts.MaxModelLen - len(prompt.IDs), least: p.MinTokens, endless: p.IgnoreEOS, stop: p.Stop}
		switch {
		case p.MaxCompletionTokens != nil && c.req.Endpoint == openai.Chat:
			w.limit = min(w.limit, *p.MaxCompletionTokens)
		case p.MaxTokens != nil:
			w.limit = min(w.limit, *p.MaxTokens)
		case c.req.Endpoint == openai.Completions:
			w.limit = min(w.limit, 16)
		case p.IgnoreEOS:
			// To the end of the context, as asked for.
		}
		for choice := range c.n {
			seq := sequence{prompt: i}
			if function != "" {
				a, err := s.lexicon.fixed(ctx, s.opts.Tokenizer, args)
				if err != nil {
					return err
				}
				if a.generated > w.limit {
					a.ids, a.ends, a.generated, a.finish = a.ids[:w.limit], a.ends[:w.limit], w.limit, "length"
					a.text = a.text[:a.ends[w.limit-1]]
				}
				seq.answer = a
				seq.tool = &toolCall{
					ID: fmt.Sprintf("chatcmpl-tool-%016x", mixID(s.opts.Seed, uint64(i), s.sequence.Add(1))), Type: "function",
					Function: toolFunction{Name: function, Arguments: a.text},
				}
			} else {
				seq.answer = s.lexicon.answer(s.opts.Seed, prompt.IDs, choice, s.opts.AnswerTokens, w)
			}
			c.seqs = append(c.seqs, seq)
		}
	}
	return nil
}

// submit gives all sequences to the engine.
func (s *Server) submit(c *call) error {
	root := block.Scope{
		Model: s.opts.Model, Adapter: c.adapter, Salt: c.req.CacheSalt, BlockTokens: s.opts.Engine.BlockTokens,
	}.Root()
	requests := make([]sim.Request, len(c.seqs))
	for i := range c.seqs {
		seq := &c.seqs[i]
		prompt := &c.prompts[seq.prompt]
		tokens := append(append(make([]uint32, 0, len(prompt.IDs)+len(seq.answer.ids)), prompt.IDs...), seq.answer.ids...)
		requests[i] = sim.Request{
			PromptTokens: len(prompt.IDs),
			OutputTokens: seq.answer.generated,
			Chain:        block.AppendChain(nil, root, tokens, s.opts.Engine.BlockTokens, prompt.Marks),
			EachToken:    c.req.Stream,
			NoRead:       c.req.PromptLogprobs,
		}
	}
	var err error
	c.ids, c.submitted, err = s.live.submit(c.job, requests)
	if errors.Is(err, sim.ErrNeverFits) {
		return s.tooLong(requests[len(c.ids)].PromptTokens, "")
	}
	return err
}

// note brings a sequence up to an event.
func (s *Server) note(c *call, ev sim.Event) *sequence {
	seq := &c.seqs[ev.ID-c.ids[0]]
	seq.tokens, seq.cached = ev.Tokens, ev.CachedTokens
	switch ev.Kind {
	case sim.FirstToken:
		s.metrics.firstToken.Observe((ev.At - c.submitted).Seconds())
	case sim.Token:
		s.metrics.interToken.Observe(1 / s.opts.Engine.DecodeRate)
	case sim.Done:
		seq.done = true
		s.metrics.latency.Observe((ev.At - c.submitted).Seconds())
		s.metrics.promptTokens.Observe(float64(len(c.prompts[seq.prompt].IDs)))
		s.metrics.generatedTokens.Observe(float64(ev.Tokens))
		s.metrics.finished.WithLabelValues("0", seq.answer.finish, s.opts.Model).Inc()
	}
	return seq
}

func (c *call) done() bool {
	for i := range c.seqs {
		if !c.seqs[i].done {
			return false
		}
	}
	return true
}

// usage sums up the call so far.
func (c *call) usage() usage {
	var u usage
	for _, p := range c.prompts {
		u.PromptTokens += len(p.IDs)
	}
	for i := range c.seqs {
		u.CompletionTokens += c.seqs[i].tokens
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}

// cached returns what usage tells of the cache: as in vLLM the last sequence's count.
func (c *call) cached(blockTokens int) (cached int, created *int) {
	last := &c.seqs[len(c.seqs)-1]
	if c.req.Endpoint == openai.Chat {
		n := max(block.Hittable(len(c.prompts[last.prompt].IDs), blockTokens)*blockTokens-last.cached, 0)
		created = &n
	}
	return last.cached, created
}

// finishOf returns a sequence's finish_reason and stop_reason.
func (c *call) finishOf(seq *sequence) finish {
	f := finish{reason: seq.answer.finish, stop: seq.answer.stopString}
	if seq.tool != nil && f.reason == "stop" && (c.req.Stream || !c.named) {
		f.reason = "tool_calls"
	}
	return f
}

// collect answers in one piece.
func (s *Server) collect(w http.ResponseWriter, r *http.Request, c *call) error {
	var events []sim.Event
	for !c.done() {
		var err error
		if events, err = c.job.take(r.Context(), events[:0]); err != nil {
			return err
		}
		for _, ev := range events {
			s.note(c, ev)
		}
	}
	var u fullUsage
	u.usage = c.usage()
	u.PromptDetails.CachedTokens, u.PromptDetails.CreatedCacheTokens = c.cached(s.opts.Engine.BlockTokens)
	if c.req.Endpoint == openai.Chat {
		out := chatAnswer{ID: c.id, Object: "chat.completion", Created: c.created, Model: c.model, SystemFingerprint: fingerprint, Usage: u}
		if c.params.ReturnTokenIDs {
			out.PromptTokenIDs = c.prompts[0].IDs
		}
		for i := range c.seqs {
			seq := &c.seqs[i]
			f := c.finishOf(seq)
			choice := chatChoice{Index: i, Message: chatMessage{Role: "assistant", Content: seq.answer.text}, FinishReason: f.reason}
			if f.stop != "" {
				choice.StopReason = &f.stop
			}
			if seq.tool != nil {
				choice.Message.Content = ""
				choice.Message.ToolCalls = []toolCall{*seq.tool}
			}
			if c.params.ReturnTokenIDs {
				choice.TokenIDs = seq.answer.ids
			}
			out.Choices = append(out.Choices, choice)
		}
		writeJSON(w, http.StatusOK, out)
		return nil
	}
	out := completionAnswer{ID: c.id, Object: "text_completion", Created: c.created, Model: c.model, SystemFingerprint: fingerprint, Usage: u}
	for i := range c.seqs {
		seq := &c.seqs[i]
		echo, err := s.echo(c, seq)
		if err != nil {
			writeError(w, err)
			return nil
		}
		f := c.finishOf(seq)
		choice := completionChoice{Index: i, Text: echo + seq.answer.text, FinishReason: f.reason}
		if f.stop != "" {
			choice.StopReason = &f.stop
		}
		if c.params.ReturnTokenIDs {
			choice.TokenIDs, choice.PromptTokenIDs = seq.answer.ids, c.prompts[seq.prompt].IDs
		}
		out.Choices = append(out.Choices, choice)
	}
	writeJSON(w, http.StatusOK, out)
	return nil
}

// echo returns the prompt's text if the request wants it in the answer.
func (s *Server) echo(c *call, seq *sequence) (string, error) {
	if !c.req.Echo || c.req.Endpoint != openai.Completions {
		return "", nil
	}
	if p := c.req.Prompts[seq.prompt]; p.Tokens == nil {
		return p.Text, nil
	}
	d, err := s.detokenizer()
	if err != nil {
		return "", err
	}
	return d.Decode(c.prompts[seq.prompt].IDs, false), nil
}

// stream answers token by token.
func (s *Server) stream(w http.ResponseWriter, r *http.Request, c *call, fault Fault) error {
	var events []sim.Event
	started := false
	written := 0
	for !c.done() {
		var err error
		if events, err = c.job.take(r.Context(), events[:0]); err != nil {
			return err
		}
		if !started {
			started = true
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			if c.req.Endpoint == openai.Chat {
				for i := range c.seqs {
					if err := send(w, c.opening(i)); err != nil {
						return err
					}
				}
			}
		}
		for _, ev := range events {
			seq := s.note(c, ev)
			if ev.Kind == sim.Done {
				continue
			}
			if fault.Kind == FaultCut && written == fault.AfterTokens {
				reset(w)
				return nil
			}
			written++
			chunk, err := s.chunk(c, int(ev.ID-c.ids[0]), seq)
			if err != nil {
				return err
			}
			if err := send(w, chunk); err != nil {
				return err
			}
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			return err
		}
	}
	if c.req.IncludeUsage {
		if err := send(w, s.closing(c)); err != nil {
			return err
		}
	}
	_, err := w.Write([]byte("data: [DONE]\n\n"))
	return err
}

func send(w http.ResponseWriter, v any) error {
	body := mustJSON(v)
	line := make([]byte, 0, len(body)+8)
	line = append(line, "data: "...)
	line = append(line, body...)
	line = append(line, "\n\n"...)
	_, err := w.Write(line)
	return err
}

// opening is the first chunk of a chat's choice, which only says whose message it is.
func (c *call) opening(index int) chatChunk {
	empty := ""
	chunk := c.chatChunk()
	chunk.PromptTokenIDs, chunk.PromptText = jsonNull, jsonNull
	chunk.Choices = []chatChunkChoice{{Index: index, Delta: chatDelta{Role: "assistant", Content: &empty}, FinishReason: jsonNull}}
	return chunk
}

func (c *call) chatChunk() chatChunk {
	return chatChunk{ID: c.id, Object: "chat.completion.chunk", Created: c.created, Model: c.model}
}

// chunk is what the latest token adds to a sequence.
func (s *Server) chunk(c *call, index int, seq *sequence) (any, error) {
	piece := seq.answer.piece(seq.tokens - 1)
	var f finish
	if seq.tokens == seq.answer.generated {
		f = c.finishOf(seq)
	}
	reason, stop := f.json()
	var u any
	if o := c.params.StreamOptions; o != nil && o.ContinuousUsageStats && c.req.IncludeUsage {
		u = c.usage()
	}
	if c.req.Endpoint != openai.Chat {
		if seq.tokens == 1 {
			echo, err := s.echo(c, seq)
			if err != nil {
				return nil, err
			}
			piece = echo + piece
		}
		if stop == nil {
			stop = jsonNull
		}
		return completionChunk{
			ID: c.id, Object: "text_completion", Created: c.created, Model: c.model, Usage: u,
			Choices: []completionChunkChoice{{Index: index, Text: piece, FinishReason: reason, StopReason: stop}},
		}, nil
	}
	choice := chatChunkChoice{Index: index, FinishReason: reason, StopReason: stop, TokenIDs: jsonNull}
	if seq.tool == nil {
		choice.Delta.Content = &piece
	} else {
		delta := toolDelta{Function: toolFunction{Arguments: piece}}
		if seq.tokens == 1 {
			delta.ID, delta.Type, delta.Function.Name = seq.tool.ID, seq.tool.Type, seq.tool.Function.Name
		}
		choice.Delta.ToolCalls = []toolDelta{delta}
	}
	chunk := c.chatChunk()
	chunk.Choices = []chatChunkChoice{choice}
	chunk.Usage = u
	return chunk, nil
}

// closing is the chunk that carries the usage.
func (s *Server) closing(c *call) any {
	var u streamUsage
	u.usage = c.usage()
	u.PromptDetails.CachedTokens, u.PromptDetails.CreatedCacheTokens = c.cached(s.opts.Engine.BlockTokens)
	if c.req.Endpoint == openai.Chat {
		chunk := c.chatChunk()
		chunk.Choices = []chatChunkChoice{}
		chunk.Usage, chunk.SystemFingerprint = u, fingerprint
		return chunk
	}
	return completionChunk{
		ID: c.id, Object: "text_completion", Created: c.created, Model: c.model, Choices: []completionChunkChoice{}, Usage: u, SystemFingerprint: fingerprint,
	}
}

// pythonFloat writes a float as Python prints it.
func pythonFloat(f float64) string {
	s := fmt.Sprint(f)
	if !strings.ContainsAny(s, ".eni") {
		s += ".0"
	}
	return s
}

func emptyList(raw json.RawMessage) bool {
	var list []json.RawMessage
	return json.Unmarshal(raw, &list) == nil && len(list) == 0
}

// mixID makes numbers that look unrelated out of ones that count up.
func mixID(parts ...uint64) uint64 {
	var x uint64
	for _, p := range parts {
		x = (x ^ p) + 0x9e3779b97f4a7c15
		x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
		x = (x ^ x>>27) * 0x94d049bb133111eb
		x ^= x >> 31
	}
	return x
}
