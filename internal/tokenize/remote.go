package tokenize

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"prefixgate/internal/openai"
)

// remoteTokenizer asks the replicas for token ids and remembers their answers. It is safe for concurrent use.
type remoteTokenizer struct {
	remote  Remote
	slots   chan struct{} // one for each call that runs
	cache   *chunkCache   // by request body
	timeout time.Duration
	metrics *metrics
}

// Outcomes of a remote tokenization, a metric's label.
const (
	remoteOK     = "ok"
	remoteCached = "cached"
	remoteFailed = "error"
	remoteBusy   = "busy"
)

func newRemoteTokenizer(opts Options, m *metrics) *remoteTokenizer {
	return &remoteTokenizer{
		remote:  opts.Remote,
		slots:   make(chan struct{}, opts.RemoteConcurrency),
		cache:   newChunkCache(opts.RemoteCacheBytes, m.remoteCache),
		timeout: opts.RemoteTimeout,
		metrics: m,
	}
}

// tokenize returns the ids for a body of /tokenize. It never waits for a free slot: what cannot be asked now is routed by load.
func (r *remoteTokenizer) tokenize(ctx context.Context, body []byte) ([]uint32, error) {
	key := string(body)
	hash := r.cache.key(key, 0)
	if e := r.cache.get(hash, key, 0); e != nil {
		r.count(remoteCached)
		return e.ids, nil
	}
	select {
	case r.slots <- struct{}{}:
	default:
		r.count(remoteBusy)
		return nil, unsupported(ReasonRemoteBusy, nil)
	}
	defer func() { <-r.slots }()
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	start := time.Now()
	ids, err := r.remote.Tokenize(ctx, body)
	r.metrics.remoteSeconds.Observe(time.Since(start).Seconds())
	if err != nil {
		r.count(remoteFailed)
		return nil, unsupported(ReasonRemote, err)
	}
	r.count(remoteOK)
	r.cache.put(&cacheEntry{text: key, ids: ids, hash: hash})
	return ids, nil
}

func (r *remoteTokenizer) count(outcome string) {
	r.metrics.remote.WithLabelValues(r.metrics.model, outcome).Inc()
}

func (r *remoteTokenizer) close() { r.cache.close() }

// encodeRemote asks the replicas for the ids of a request.
func (m *Model) encodeRemote(ctx context.Context, req *openai.Request, keep int) (Encoded, error) {
	if req.Endpoint == openai.Chat {
		ids, err := m.remote.tokenize(ctx, chatBody(req))
		if err != nil {
			return Encoded{}, err
		}
		ids = lastIDs(ids, keep)
		return Encoded{Prompts: []Prompt{{IDs: ids, Marks: unplaced(req.Images)}}}, nil
	}
	enc := Encoded{Prompts: make([]Prompt, len(req.Prompts))}
	for i, p := range req.Prompts {
		if p.Tokens != nil {
			enc.Prompts[i].IDs = lastIDs(p.Tokens, keep)
			continue
		}
		ids, err := m.remote.tokenize(ctx, promptBody(req, p.Text))
		if err != nil {
			return Encoded{}, err
		}
		if keep > 0 && keep < len(ids) {
			// Which of the ids are the tokenizer's own, that stay, is not in the answer.
			return Encoded{}, unsupported(ReasonTruncate, nil)
		}
		enc.Prompts[i].IDs = ids
	}
	return enc, nil
}

// chatBody returns the body of /tokenize for a chat request: its fields that matter to the prompt, as they stand.
func chatBody(req *openai.Request) []byte {
	b := newBody(req.Model, len(req.Messages)+len(req.Tools)+512)
	b.raw("messages", req.Messages)
	b.raw("tools", req.Tools)
	b.raw("documents", req.Documents)
	b.raw("chat_template_kwargs", req.ChatTemplateKwargs)
	b.raw("reasoning_effort", req.ReasoningEffort)
	b.flag("add_generation_prompt", req.AddGenerationPrompt)
	b.flag("continue_final_message", req.ContinueFinalMessage)
	b.flag("add_special_tokens", req.AddSpecialTokens)
	return b.end()
}

// promptBody returns the body of /tokenize for one prompt of a completion request.
func promptBody(req *openai.Request, text string) []byte {
	b := newBody(req.Model, len(text)+len(text)/8+256)
	b.raw("prompt", quote(text))
	b.flag("add_special_tokens", req.AddSpecialTokens)
	return b.end()
}

// jsonBody writes a JSON object field by field.
type jsonBody struct{ bytes.Buffer }

func newBody(model string, size int) *jsonBody {
	b := new(jsonBody)
	b.Grow(size)
	b.WriteString(`{"model":`)
	b.Write(quote(model))
	return b
}

func (b *jsonBody) raw(key string, value json.RawMessage) {
	if value != nil {
		fmt.Fprintf(b, `,%q:`, key)
		b.Write(value)
	}
}

func (b *jsonBody) flag(key string, value *bool) {
	if value != nil {
		fmt.Fprintf(b, `,%q:%t`, key, *value)
	}
}

func (b *jsonBody) end() []byte {
	b.WriteByte('}')
	return b.Bytes()
}

// quote returns text as a JSON string.
func quote(text string) []byte {
	quoted, err := json.Marshal(text)
	if err != nil {
		panic("BUG: a string that does not marshal: " + err.Error())
	}
	return quoted
}
