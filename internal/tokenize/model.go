package tokenize

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
	"unsafe"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
	"prefixgate/internal/tokenize/render"

	"github.com/prometheus/client_golang/prometheus"
)

// Encoded are the token ids of a request.
type Encoded struct {
	// Prompts are in the request's order; a chat request has one.
	Prompts []Prompt
}

// Release gives the memory of the ids back for other requests. It is a courtesy that spares the collector a few hundred
// kilobytes for each long prompt; whoever calls it must not use the ids, or a copy of e, any more.
func (e *Encoded) Release() {
	for i := range e.Prompts {
		p := &e.Prompts[i]
		if p.buffer != nil {
			p.buffer.release(p.IDs)
		}
		p.IDs, p.buffer = nil, nil
	}
}

// Prompt is one prompt as the engine will see it.
type Prompt struct {
	// IDs are the token ids. They may be shared: nobody writes to them.
	IDs []uint32
	// Rendered is the text that the ids stand for; filled by Explain only.
	Rendered string
	// Marks say where images and the like stand, ordered by token.
	Marks []block.Mark

	buffer *idBuffer // what IDs is part of; nil if it is nobody's to give back
}

// idBuffer is memory for the ids of one prompt.
type idBuffer struct {
	ids  []uint32
	pool *sync.Pool
}

// maxPooledIDs bounds the buffers that are kept, in ids.
const maxPooledIDs = 1 << 20

func (b *idBuffer) release(ids []uint32) {
	if cap(ids) <= maxPooledIDs {
		b.ids = ids[:0]
		b.pool.Put(b)
	}
}

// place says where the ids of a kind of request are found.
type place string

const (
	placeLocal  place = "local"
	placeRemote place = "remote"
	placeOff    place = "off"
)

// Model turns the requests of one model into token ids. Its methods are safe for concurrent use.
type Model struct {
	opts        Options
	log         *slog.Logger
	metrics     *metrics
	fingerprint uint64

	// chat and completions say where the ids of each kind of request come from; why is the reason where it is off.
	chat, completions place
	encoderName       encoderName
	cutKinds          []cutKind

	encoder  *encoder // nil without a local tokenizer
	pool     *pool
	chunks   *chunker
	framing  framing
	template *render.Template // nil without a chat template that is known
	remote   *remoteTokenizer // nil without a Remote

	buffers sync.Pool // of *idBuffer

	// mu is read-locked by every call and locked by Close, which so waits for them.
	mu     sync.RWMutex
	closed bool
}

// Load finds, builds and proves the tokenizer and the chat template of a model. It may download files, which ctx and
// Options.HubTimeout bound, and takes up to a few seconds. An error names the file or setting at fault. log gets one line
// about what was loaded, and one for each thing that is not as fast or as exact as it could be. reg may be nil.
func Load(ctx context.Context, opts Options, log *slog.Logger, reg prometheus.Registerer) (*Model, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	opts = opts.withDefaults()
	m := &Model{opts: opts, log: log.With("model", opts.Name), metrics: newMetrics(reg, opts.Name), chat: placeOff, completions: placeOff, encoderName: nameNone}
	start := time.Now()
	if opts.Remote != nil && opts.Mode != ModeOff && opts.Mode != ModeLocal {
		m.remote = newRemoteTokenizer(opts, m.metrics)
	}
	var why string
	switch opts.Mode {
	case ModeOff:
		why = "mode is off"
		m.fingerprint = nameFingerprint(opts.Name)
	case ModeRemote:
		if m.remote == nil {
			return nil, errors.New("mode is remote, but no replica is there to ask: set mode to local, auto or off")
		}
		m.chat, m.completions = placeRemote, placeRemote
		why = "mode is remote"
		m.fingerprint = nameFingerprint(opts.Name)
	case ModeAuto, ModeLocal:
		var err error
		if why, err = m.loadLocal(ctx); err != nil {
			return nil, err
		}
	}
	m.metrics.loadSeconds.Set(time.Since(start).Seconds())
	m.report(1)
	attrs := []any{
		"encoder", string(m.encoderName), "chat", string(m.chat), "completions", string(m.completions), "cuts", m.cutKinds,
		"load_ms", time.Since(start).Milliseconds(),
	}
	if m.chat != placeLocal || m.completions != placeLocal {
		m.log.Warn("token ids are not all known in the gateway", append(attrs, "reason", why)...)
	} else {
		m.log.Info("tokenizer loaded", attrs...)
	}
	return m, nil
}

// loadLocal loads what can be known in the gateway. It returns why something cannot.
func (m *Model) loadLocal(ctx context.Context) (why string, err error) {
	path, err := findModel(ctx, m.opts, m.log)
	if err != nil {
		return "", err
	}
	src, err := readSource(path, m.opts.ChatTemplate)
	if err != nil {
		return "", err
	}
	foreign := src.foreign()
	elsewhere := placeOff
	if m.remote != nil {
		elsewhere = placeRemote
	}
	m.chat, m.completions = elsewhere, elsewhere
	if foreign.completions != "" {
		m.fingerprint = nameFingerprint(m.opts.Name)
		return foreign.completions, nil
	}
	if err := m.loadTokenizer(src); err != nil {
		return "", fmt.Errorf("tokenizer %s: %w: check the file, or set mode to remote or off", src.tokenizerPath, err)
	}
	m.completions = placeLocal
	if foreign.chat != "" {
		return foreign.chat, nil
	}
	m.template, why = m.loadTemplate(src)
	if m.template != nil {
		m.chat = placeLocal
	}
	return why, nil
}

// loadTokenizer builds and proves the encoder and what depends on it.
func (m *Model) loadTokenizer(src *source) error {
	v, err := readVocabulary(src.tokenizerJSON)
	if err != nil {
		return err
	}
	added, err := src.extraTokens(v.AddedTokens)
	if err != nil {
		return err
	}
	extra, err := json.Marshal(added)
	if err != nil {
		return err
	}
	special := make([]string, 0, len(v.AddedTokens))
	for _, token := range v.AddedTokens {
		if token.Content != "" {
			special = append(special, token.Content)
		}
	}
	e, name, slow, err := chooseEncoder(src.tokenizerJSON, extra, special, m.opts.Encoder)
	if err != nil {
		return err
	}
	if slow != nil {
		m.log.Warn("HuggingFace's encoder is used, which is slower", "reason", slow.Error())
	}
	if m.framing, err = findFraming(e, src); err != nil {
		e.close()
		return fmt.Errorf("the encoder fails on a plain text: %w", err)
	}
	cuts, off, err := proveCuts(e, v, append(v.AddedTokens, added...))
	if err != nil {
		e.close()
		return err
	}
	for _, kind := range allCutKinds {
		if off[kind] != nil {
			m.log.Debug("a kind of cut is off for this tokenizer", "kind", string(kind), "reason", off[kind].Error())
		}
	}
	m.encoder, m.encoderName, m.cutKinds = e, name, cuts.kinds()
	m.pool = newPool(e, m.opts.Workers, m.metrics.busy, corpusTexts[:]...)
	m.chunks = newChunker(m.pool, cuts, m.opts.CacheBytes, m.metrics)
	m.fingerprint = contentFingerprint(src.tokenizerJSON, extra, m.framing)
	trimNative() // the parsed file and the encoder that was not chosen are free now: hundreds of megabytes
	return nil
}

// Fingerprint identifies the tokenizer: equal on every gateway that loaded the same files, and unequal wherever a text could
// have other ids.
func (m *Model) Fingerprint() uint64 { return m.fingerprint }

// Name returns the name by which metrics and logs know the model.
func (m *Model) Name() string { return m.opts.Name }

// Close frees the model's threads and native memory. It waits for calls that are running; later ones get ReasonClosed. A
// second call does nothing. Its error is always nil.
func (m *Model) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	m.report(-1)
	if m.chunks != nil {
		m.chunks.close()
	}
	if m.pool != nil {
		m.pool.close() // the last encoding that nobody waits for ends here
		m.encoder.close()
	}
	if m.template != nil {
		_ = m.template.Close() // never fails
	}
	if m.remote != nil {
		m.remote.close()
	}
	return nil
}

// report adds the model to the gauges (1), or takes it out (-1).
func (m *Model) report(sign float64) {
	m.metrics.info.WithLabelValues(m.opts.Name, string(m.encoderName), string(m.chat), string(m.completions)).Add(sign)
	if m.pool == nil {
		return
	}
	m.metrics.workers.Add(sign * float64(m.opts.Workers))
	for _, kind := range allCutKinds {
		on := 0.0
		for _, k := range m.cutKinds {
			if k == kind {
				on = sign
			}
		}
		m.metrics.cuts.WithLabelValues(m.opts.Name, string(kind)).Add(on)
	}
}

// Encode returns the token ids of a request. The error is always an *Unsupported: the request is to be routed by load. It
// returns within Options.Timeout (RemoteTimeout where a replica has to be asked), or soon after ctx is done, plus the time that
// rendering the chat template may take.
func (m *Model) Encode(ctx context.Context, req *openai.Request) (Encoded, error) {
	start := time.Now()
	enc, err := m.encode(ctx, req, m.opts.Timeout, false)
	m.metrics.encodeSeconds.Observe(time.Since(start).Seconds())
	if u, ok := errors.AsType[*Unsupported](err); ok {
		m.metrics.refused(u.Reason)
	}
	return enc, err
}

// Explain returns what Encode computes together with the text behind it, for people who debug templates. Options.Timeout does
// not count. Of several prompts it returns the first. rendered may be filled even where err is not nil.
func (m *Model) Explain(ctx context.Context, req *openai.Request) (rendered string, ids []uint32, err error) {
	enc, err := m.encode(ctx, req, 0, true)
	if len(enc.Prompts) == 0 {
		return "", nil, err
	}
	return enc.Prompts[0].Rendered, enc.Prompts[0].IDs, err
}

// encode does the work of Encode. A timeout of 0 sets none.
func (m *Model) encode(ctx context.Context, req *openai.Request, timeout time.Duration, explain bool) (Encoded, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.closed {
		return Encoded{}, unsupported(ReasonClosed, nil)
	}
	if req.LoadOnly != "" {
		return Encoded{}, loadOnly(req.LoadOnly)
	}
	if timeout > 0 {
		if req.Endpoint == openai.Chat && m.chat == placeRemote || req.Endpoint == openai.Completions && m.completions == placeRemote {
			timeout = m.opts.RemoteTimeout
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, timeout, errBudget)
		defer cancel()
	}
	keep := 0
	if k := req.TruncatePromptTokens; k != nil {
		if *k <= 0 {
			return Encoded{}, unsupported(ReasonTruncate, nil)
		}
		keep = *k
	}
	switch req.Endpoint {
	case openai.Chat:
		return m.encodeChat(ctx, req, keep, explain)
	case openai.Completions:
		return m.encodeCompletions(ctx, req, keep, explain)
	case openai.Other, openai.Responses, openai.Messages, openai.Embeddings:
	}
	return Encoded{}, loadOnly(openai.ReasonEndpoint)
}

// errBudget is the cause of a context that Options.Timeout ended.
var errBudget = errors.New("the tokenization budget is used up")

func (m *Model) encodeChat(ctx context.Context, req *openai.Request, keep int, explain bool) (Encoded, error) {
	if req.ChatTemplate {
		return Encoded{}, loadOnly(openai.ReasonChatTemplate)
	}
	switch m.chat {
	case placeOff:
		if m.opts.Mode == ModeOff {
			return Encoded{}, unsupported(ReasonOff, nil)
		}
		return Encoded{}, unsupported(ReasonNoTemplate, nil)
	case placeRemote:
		return m.encodeRemote(ctx, req, keep)
	case placeLocal:
	}
	result, err := m.template.Render(&render.Input{
		Messages: req.Messages, Tools: req.Tools, ToolChoice: req.ToolChoice, Documents: req.Documents,
		ChatTemplateKwargs: req.ChatTemplateKwargs, ReasoningEffort: req.ReasoningEffort,
		AddGenerationPrompt: req.AddGenerationPrompt, ContinueFinalMessage: req.ContinueFinalMessage,
	})
	if err != nil {
		return Encoded{}, renderFailure(err)
	}
	// The text is this call's own and never changes.
	text := unsafe.String(unsafe.SliceData(result.Text), len(result.Text))
	prompt := Prompt{}
	if explain {
		prompt.Rendered = text
	}
	addSpecial := req.AddSpecialTokens != nil && *req.AddSpecialTokens
	err = m.fill(ctx, &prompt, text, addSpecial, keep)
	if err == nil && len(req.Images) > 0 {
		prompt.Marks, err = m.marks(ctx, text, addSpecial, keep, req.Images, result.Media)
	}
	return Encoded{Prompts: []Prompt{prompt}}, err
}

// renderFailure says why a request has no rendered prompt.
func renderFailure(err error) *Unsupported {
	if e, ok := errors.AsType[*render.Error](err); ok {
		switch e.Kind {
		case render.Refused, render.Failed, render.Invalid:
			return unsupported(ReasonRefused, err)
		case render.Unsupported, render.Limit, render.Panicked:
		}
	}
	return unsupported(ReasonTemplate, err)
}

func (m *Model) encodeCompletions(ctx context.Context, req *openai.Request, keep int, explain bool) (Encoded, error) {
	switch m.completions {
	case placeOff:
		if !allTokens(req.Prompts) {
			return Encoded{}, unsupported(ReasonOff, nil)
		}
	case placeRemote:
		if !allTokens(req.Prompts) {
			return m.encodeRemote(ctx, req, keep)
		}
	case placeLocal:
	}
	addSpecial := req.AddSpecialTokens == nil || *req.AddSpecialTokens
	enc := Encoded{Prompts: make([]Prompt, len(req.Prompts))}
	for i, p := range req.Prompts {
		if p.Tokens != nil {
			enc.Prompts[i].IDs = lastIDs(p.Tokens, keep)
			continue
		}
		if explain {
			enc.Prompts[i].Rendered = p.Text
		}
		if err := m.fill(ctx, &enc.Prompts[i], p.Text, addSpecial, keep); err != nil {
			return Encoded{Prompts: enc.Prompts[:i+1]}, err
		}
	}
	return enc, nil
}

// allTokens says whether every prompt came as token ids, which no tokenizer has to touch.
func allTokens(prompts []openai.Prompt) bool {
	for _, p := range prompts {
		if p.Tokens == nil {
			return false
		}
	}
	return true
}

// fill encodes text into a buffer that p then owns.
func (m *Model) fill(ctx context.Context, p *Prompt, text string, addSpecial bool, keep int) error {
	buffer, _ := m.buffers.Get().(*idBuffer)
	if buffer == nil {
		buffer = &idBuffer{pool: &m.buffers}
	}
	ids, err := m.encodeText(ctx, buffer.ids[:0], text, addSpecial, keep)
	if err != nil {
		m.buffers.Put(buffer)
		return err
	}
	p.IDs, p.buffer = ids, buffer
	return nil
}

// encodeText appends the ids of one text, framed, to dst, which is empty. keep is the number of tokens to keep from the end,
// framing included; 0 keeps all.
func (m *Model) encodeText(ctx context.Context, dst []uint32, text string, addSpecial bool, keep int) ([]uint32, error) {
	var before, after []uint32
	var err error
	if addSpecial && !m.framing.exact {
		dst, err = m.chunks.encodeWhole(ctx, dst, text, true, nil, nil)
	} else {
		if addSpecial {
			before, after = m.framing.before, m.framing.after
		}
		dst, err = m.chunks.encode(ctx, dst, text, before, after)
	}
	switch {
	case err != nil:
		return nil, encodeFailure(ctx, err)
	case keep == 0 || keep >= len(dst):
		return dst, nil
	case addSpecial && !m.framing.exact, keep < len(before)+len(after):
		// Where special tokens go in a truncated text only the tokenizer knows.
		return nil, unsupported(ReasonTruncate, nil)
	}
	// The tokenizer keeps its special tokens and drops text from the left.
	return slices.Delete(dst, len(before), len(dst)-keep+len(before)), nil
}

// lastIDs returns the last keep ids; all of them where keep is 0.
func lastIDs(ids []uint32, keep int) []uint32 {
	if keep > 0 && keep < len(ids) {
		return ids[len(ids)-keep:]
	}
	return ids
}

// encodeFailure says why an encoding failed.
func encodeFailure(ctx context.Context, err error) *Unsupported {
	switch {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errBudget), errors.Is(err, context.DeadlineExceeded):
		return unsupported(ReasonTimeout, nil)
	case ctx.Err() != nil:
		return unsupported(ReasonCanceled, nil)
	case errors.Is(err, errBadText):
		return unsupported(ReasonText, nil)
	}
	return unsupported(ReasonEncoder, err)
}

// fingerprintVersion is part of every fingerprint. Raise it when the same files come to give other ids.
const fingerprintVersion = 1

func contentFingerprint(tokenizerJSON, extra []byte, f framing) uint64 {
	h := sha256.New()
	var n [8]byte
	number := func(v uint64) {
		binary.LittleEndian.PutUint64(n[:], v)
		_, _ = h.Write(n[:]) // never fails
	}
	number(fingerprintVersion)
	for _, part := range [...][]byte{tokenizerJSON, extra} {
		number(uint64(len(part)))
		_, _ = h.Write(part)
	}
	for _, ids := range [...][]uint32{f.before, f.after} {
		number(uint64(len(ids)))
		for _, id := range ids {
			number(uint64(id))
		}
	}
	return binary.LittleEndian.Uint64(h.Sum(nil))
}

// nameFingerprint is the fingerprint of a tokenizer of which only the model's name is known.
func nameFingerprint(name string) uint64 {
	h := sha256.Sum256(append([]byte("\x01name\x00"), name...))
	return binary.LittleEndian.Uint64(h[:8])
}
