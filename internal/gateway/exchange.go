package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/config"
	"prefixgate/internal/index"
	"prefixgate/internal/openai"
	"prefixgate/internal/proxy"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/tokenize"
)

// prefixBlocks is how many leading blocks name a prompt's prefix where equally good replicas are told apart: enough for
// conversations with a common system prompt to meet, and for others not to.
const prefixBlocks = 16

// estimatedBytesPerToken and maxEstimatedTokens give the length of a prompt that is not tokenized. It only says how much a
// replica has to do.
const (
	estimatedBytesPerToken = 4
	maxEstimatedTokens     = 16 << 10
)

// exchange is one request on its way through the gateway. It belongs to the request's own goroutine.
type exchange struct {
	g        *Gateway
	w        http.ResponseWriter
	r        *http.Request
	endpoint openai.Endpoint
	start    time.Time
	id       string

	req    *openai.Request
	body   []byte // as it is forwarded
	served servedModel
	label  string // of the model, in metrics and logs
	name   string // of the model, as replicas know it
	model  *model // nil without a tokenizer
	tokens *tokenize.Model

	encoded      tokenize.Encoded // released at the end
	promptTokens int
	loadOnly     fallback
	chains       []chains

	*survey
	policy     route.Policy
	decideFrom time.Time
	decided    time.Duration

	limited *limitedBody // the client's body if it is streamed

	current   *attempt
	tried     []string
	header    http.Header // for replicas
	response  response
	result    outcome
	status    int
	forwarded proxy.Outcome
	code      string // of an error of the gateway's own
	err       error  // what went wrong, for the log
}

// survey is what is known of the fleet at one time, and of what it holds of a request's prompts. With a thousand replicas it is
// some hundred kilobytes, so surveys are used again.
type survey struct {
	snapshots  []replica.Snapshot
	candidates []route.Candidate
	at         []int    // candidates[i] is snapshots[at[i]]
	believed   []belief // believed[i] is about candidates[i] of the first attempt
	// blockTokens is the block size of replicas that do not tell theirs.
	blockTokens int

	// Scratch of match.
	holders []index.Holder
	ids     []replica.ID
	members []int
	blocks  []int
}

var surveys = sync.Pool{New: func() any { return new(survey) }}

func newSurvey() *survey {
	s, _ := surveys.Get().(*survey)
	s.snapshots, s.candidates, s.at, s.believed = s.snapshots[:0], s.candidates[:0], s.at[:0], s.believed[:0]
	return s
}

// chains are the block hashes of a request's prompts for replicas of one block size.
type chains struct {
	blockTokens int
	prompts     [][]block.Hash
}

// belief is how many of the prompts' tokens a replica is believed to hold.
type belief struct {
	id     replica.ID
	tokens int
	blocks int
}

// attempt is the try on the replica that is being asked.
type attempt struct {
	id       replica.ID
	lease    *replica.Lease
	decision route.Decision
	believed belief
	// blockTokens is the replica's block size and chains the prompts' hashes for it.
	blockTokens int
	chains      [][]block.Hash
	flights     []*flight
	sent        time.Time
	ttft        time.Duration // 0 until the first token
	recorded    bool
	prefilled   *time.Timer // ends the prefill of an answer that does not show its first token
}

// begin starts the account of a request.
func (g *Gateway) begin(w http.ResponseWriter, r *http.Request, ep openai.Endpoint) *exchange {
	x := &exchange{
		g: g, w: w, r: r, endpoint: ep, start: time.Now(), id: requestID(r.Header), label: labelNone, policy: g.policy, current: &attempt{},
		survey: newSurvey(),
		result: outcomePanic, // unless it comes to another end
	}
	x.header = http.Header{requestIDHeader: {x.id}}
	x.response.x = x
	g.metrics.inFlight.Inc()
	return x
}

// refuse answers with an error of the gateway's own.
func (x *exchange) refuse(err error, result outcome) {
	x.err, x.result = nil, result
	if errors.Is(err, errBodyCut) {
		x.result = outcome(proxy.ResultClientGone)
	}
	x.w.Header().Set(requestIDHeader, x.id)
	openai.WriteError(x.w, err)
	x.status = http.StatusInternalServerError
	if e, ok := errors.AsType[*openai.Error](err); ok {
		// The message is for the client: it may repeat the name of a model.
		x.status, x.code = e.Status, e.Code
	}
}

// readBody reads the body and takes off its Content-Encoding: engines read none.
func (x *exchange) readBody() error {
	s := &x.g.server
	body, err := readBody(x.w, x.r, s.MaxBodyBytes, s.BodyTimeout, s.BodyMinRate)
	if err != nil {
		return err
	}
	body, err = openai.DecodeBody(x.r.Header, body, s.MaxBodyBytes)
	if err != nil {
		return err
	}
	x.r.Header.Del("Content-Encoding")
	x.body = body
	x.decideFrom = time.Now()
	return nil
}

// resolve finds out which model is meant and which replicas may serve it.
func (x *exchange) resolve() error {
	x.name = x.req.Model
	if name, ok := x.g.tokenizers.aliases[x.name]; ok {
		x.body = replaceModel(x.body, name)
		x.name = name
	}
	x.snapshots = x.g.fleet.AppendSnapshots(x.snapshots[:0])
	cat := x.g.catalogs.of(x.snapshots)
	asked := x.name
	if asked == "" {
		asked = cat.only // what an engine takes if a request names no model
	}
	served, ok := cat.served[asked]
	switch {
	case ok:
		x.served = served
		if x.name != "" {
			x.label = served.label
		}
	case x.name == "":
		// Several models and none named: each engine will take its own.
	case x.g.tokenizers.byName[x.name] != nil:
		x.served, x.label = servedModel{base: x.name}, x.name
	case cat.silent:
		x.served, x.label = servedModel{base: x.name}, labelOther
	case len(x.snapshots) == 0:
		x.label = labelOther
		return openai.NoReplica(x.g.retryAfter)
	default:
		x.label = labelOther
		return openai.ModelNotFound(x.name)
	}
	x.model = x.g.tokenizers.of(asked, x.served)
	if x.name == "" && !ok {
		x.model = nil
	}
	return nil
}

// encode finds the token ids of the prompts, or why there are none.
func (x *exchange) encode(ctx context.Context) {
	x.loadOnly = x.tryEncode(ctx)
	if x.loadOnly != "" {
		x.g.metrics.loadOnly.WithLabelValues(string(x.loadOnly)).Inc()
	}
}

func (x *exchange) tryEncode(ctx context.Context) (why fallback) {
	defer func() {
		// A fault of the tokenizer costs a request its prefix, not its answer.
		if v := recover(); v != nil {
			x.g.caught(v)
			why = fallbackPanic
		}
		if why != "" {
			x.encoded, x.promptTokens = tokenize.Encoded{}, 0
		}
	}()
	if x.model == nil {
		return fallbackNoTokenizer
	}
	x.tokens = x.model.loaded.Load()
	if x.tokens == nil {
		return fallbackNotLoaded
	}
	encoded, err := x.tokens.Encode(ctx, x.req)
	var u *tokenize.Unsupported
	switch {
	case errors.As(err, &u):
		return fallback(u.Reason)
	case err != nil:
		return fallback(tokenize.ReasonEncoder)
	}
	x.encoded = encoded
	for i := range encoded.Prompts {
		x.promptTokens += len(encoded.Prompts[i].IDs)
	}
	return ""
}

// look makes a candidate of each replica that may serve the model and has not been tried.
func (x *exchange) look() {
	x.candidates, x.at = x.candidates[:0], x.at[:0]
	x.blockTokens = 0
	now := time.Now()
	adapter := x.served.adapter
	usable := false
	for i := range x.snapshots {
		s := &x.snapshots[i]
		if !serves(s, x.name) || slices.Contains(x.tried, s.ID.Addr) {
			continue
		}
		c := route.Candidate{
			ID:            s.ID,
			QueuedTokens:  s.PrefillTokens,
			QueuedPrompts: s.Prefills,
			InFlight:      s.InFlight,
			Running:       s.Running,
			Waiting:       s.Waiting,
			KVUsage:       s.KVUsage,
			PrefillRate:   s.PrefillRate,
			MetricsFresh:  s.MetricsFresh,
			Healthy:       s.Healthy,
			Draining:      s.Draining,
			Weight:        s.Weight,
		}
		began := s.PrefillBegan
		if others, ok := x.g.othersLoad(s.ID); ok {
			c.QueuedTokens += others.PrefillTokens
			c.QueuedPrompts += others.Prefills
			c.InFlight += others.Requests
			if others.Began.After(began) {
				began = others.Began
			}
		}
		if c.QueuedPrompts > 0 {
			c.QueueAge = now.Sub(began)
		}
		if adapter != "" {
			c.Adapter = adapterState(s, adapter)
		}
		usable = usable || c.Healthy && !c.Draining
		x.candidates = append(x.candidates, c)
		x.at = append(x.at, i)
		if x.blockTokens == 0 {
			x.blockTokens = s.BlockTokens
		}
	}
	if !usable {
		// Rather one that failed a moment ago, but says that it is well, than no answer at all.
		for i, at := range x.at {
			x.candidates[i].Healthy = x.snapshots[at].Up
		}
	}
	switch {
	case x.model != nil && x.model.config.BlockTokens > 0:
		x.blockTokens = x.model.config.BlockTokens
	case x.blockTokens == 0:
		x.blockTokens = config.DefaultBlockTokens
	}
}

func adapterState(s *replica.Snapshot, adapter string) route.AdapterState {
	switch {
	case slices.Contains(s.LoadedAdapters, adapter), slices.Contains(s.WaitingAdapters, adapter):
		return route.AdapterLoaded
	case s.MaxAdapters <= 0:
		return route.AdapterUnknown
	case len(s.LoadedAdapters)+len(s.WaitingAdapters) < s.MaxAdapters:
		return route.AdapterLoadable
	}
	return route.AdapterFull
}

// chain hashes the prompts' blocks, once for each block size among the candidates.
func (x *exchange) chain() {
	x.chains = x.chains[:0]
	if x.loadOnly != "" {
		return
	}
	for _, i := range x.at {
		x.chainOf(x.blockTokensOf(&x.snapshots[i]))
	}
}

// blockTokensOf is the block size of a replica: what it tells, else what the configuration or the model's other replicas say.
func (x *exchange) blockTokensOf(s *replica.Snapshot) int {
	if s.BlockTokens > 0 {
		return s.BlockTokens
	}
	return x.blockTokens
}

func (x *exchange) chainOf(blockTokens int) *chains {
	for i := range x.chains {
		if x.chains[i].blockTokens == blockTokens {
			return &x.chains[i]
		}
	}
	root := x.scope(blockTokens).Root()
	c := chains{blockTokens: blockTokens, prompts: make([][]block.Hash, len(x.encoded.Prompts))}
	for i, p := range x.encoded.Prompts {
		hashes := make([]block.Hash, 0, len(p.IDs)/blockTokens)
		c.prompts[i] = block.AppendChain(hashes, root, p.IDs, blockTokens, p.Marks)
	}
	x.chains = append(x.chains, c)
	return &x.chains[len(x.chains)-1]
}

func (x *exchange) scope(blockTokens int) block.Scope {
	return block.Scope{
		Tokenizer:   x.tokens.Fingerprint(),
		Model:       x.served.base,
		Adapter:     x.served.adapter,
		Salt:        x.req.CacheSalt,
		BlockTokens: blockTokens,
	}
}

// match finds how much of the prompts each candidate is believed to hold, or is computing.
func (x *exchange) match(ctx context.Context) {
	x.believed = x.believed[:0]
	for i := range x.candidates {
		x.believed = append(x.believed, belief{id: x.candidates[i].ID})
	}
	if x.loadOnly != "" || x.req.PromptLogprobs {
		return // an engine computes the whole prompt to tell its log probabilities
	}
	for g := range x.chains {
		group := &x.chains[g]
		holders, ids, members := x.holders[:0], x.ids[:0], x.members[:0]
		for i, at := range x.at {
			s := &x.snapshots[at]
			if x.blockTokensOf(s) != group.blockTokens {
				continue
			}
			holders = append(holders, index.Holder{ID: s.ID, MaxAge: residence(s)})
			ids = append(ids, s.ID)
			members = append(members, i)
		}
		blocks := slices.Grow(x.blocks[:0], len(members))[:len(members)]
		x.holders, x.ids, x.members, x.blocks = holders, ids, members, blocks
		for p, hashes := range group.prompts {
			hashes = hashes[:min(len(hashes), block.Hittable(len(x.encoded.Prompts[p].IDs), group.blockTokens))]
			if len(hashes) == 0 {
				continue
			}
			// An error is counted by the index; blocks then holds what this gateway knows by itself.
			_ = x.g.index.Match(ctx, hashes, holders, blocks)
			x.g.pending.match(hashes, ids, blocks)
			for j, i := range members {
				n := min(blocks[j], len(hashes))
				x.believed[i].blocks += n
				x.believed[i].tokens += n * group.blockTokens
			}
		}
	}
}

// routeRequest is what policies may know of the request.
func (x *exchange) routeRequest() route.Request {
	q := route.Request{PromptTokens: x.promptTokens, Adapter: x.served.adapter != ""}
	if len(x.chains) > 0 && len(x.chains[0].prompts) > 0 {
		if hashes := x.chains[0].prompts[0]; len(hashes) > 0 {
			q.Prefix = uint64(hashes[min(len(hashes), prefixBlocks)-1])
		}
	}
	x.g.keys.fill(&q, x)
	return q
}

// next picks the replica for attempt n: the best of those not tried yet, as they are now.
func (x *exchange) next(n int) (proxy.Attempt, bool) {
	// Once more, also for the first attempt: while the prompt was encoded and looked up, other requests were sent, and a
	// burst that sees one and the same instant would all go to one replica.
	x.snapshots = x.g.fleet.AppendSnapshots(x.snapshots[:0])
	x.look()
	for i := range x.candidates {
		x.candidates[i].MatchedTokens = x.beliefOf(i).tokens
	}
	q := x.routeRequest()
	d, ok := x.policy.Pick(&q, x.candidates)
	if !ok {
		return proxy.Attempt{}, false
	}
	picked := x.candidates[d.Index]
	a := &attempt{id: picked.ID, decision: d, believed: x.beliefOf(d.Index)}
	todo := x.promptTokens - a.believed.tokens
	if x.promptTokens == 0 {
		todo = min(len(x.body)/estimatedBytesPerToken, maxEstimatedTokens)
	}
	lease, ok := x.g.fleet.Acquire(picked.ID.Addr, todo)
	x.tried = append(x.tried, picked.ID.Addr)
	if !ok {
		return x.next(n + 1) // it was removed in this very moment
	}
	a.lease = lease
	if x.loadOnly == "" && x.req != nil {
		a.blockTokens = x.blockTokensOf(&x.snapshots[x.at[d.Index]])
		a.chains = x.chainOf(a.blockTokens).prompts
		for _, hashes := range a.chains {
			if f := x.g.pending.add(a.id, hashes); f != nil {
				a.flights = append(a.flights, f)
			}
		}
	}
	x.g.metrics.decisions[d.Reason].Inc()
	a.sent = time.Now()
	if x.decided == 0 {
		x.decided = max(a.sent.Sub(x.decideFrom), 1)
		x.g.metrics.decide.Observe(x.decided.Seconds())
	}
	if x.req == nil || !x.req.Stream {
		// The answer comes as a whole; its prefill is over long before. Taken to be so after the time expected.
		a.prefilled = time.AfterFunc(d.ExpectedTTFT+d.ExpectedTTFT/4+50*time.Millisecond, func() { lease.FirstToken(0) })
	}
	x.current = a
	return proxy.Attempt{Addr: a.id.Addr, Done: func(result proxy.Result) { x.done(a, result) }}, true
}

// beliefOf returns what candidate i is believed to hold. After the first attempt the candidates are others, in another order.
func (x *exchange) beliefOf(i int) belief {
	id := x.candidates[i].ID
	if i < len(x.believed) && x.believed[i].id == id {
		return x.believed[i]
	}
	for _, b := range x.believed {
		if b.id == id {
			return b
		}
	}
	return belief{id: id}
}

// done ends an attempt. The next one may have been picked already.
func (x *exchange) done(a *attempt, result proxy.Result) {
	x.g.metrics.attempts.WithLabelValues(string(result)).Inc()
	switch result {
	case proxy.ResultOK:
		a.lease.Succeeded()
		x.firstToken(false) // of an answer that came as a whole
	case proxy.ResultDial:
		a.lease.Failed(replica.FailureConnect)
	case proxy.ResultFailed, proxy.ResultBroken, proxy.ResultRefused:
		a.lease.Failed(replica.FailureReset)
	case proxy.ResultFirstByteTimeout, proxy.ResultIdleTimeout:
		a.lease.Failed(replica.FailureFirstByte)
	case proxy.ResultNoReplica, proxy.ResultTotalTimeout, proxy.ResultBadBody, proxy.ResultClientGone, proxy.ResultClientStalled:
		// Nobody's fault, or not the replica's.
	}
	if a.prefilled != nil {
		a.prefilled.Stop()
	}
	a.lease.Release()
	for _, f := range a.flights {
		x.g.pending.remove(f)
	}
	a.flights = nil
}

// firstToken is called when the current attempt's first token has come, and once more at the end of a good answer. The
// prompt has been computed then, so its replica gets the credit: not before, since the attempt could have failed, and no
// other replica.
func (x *exchange) firstToken(streamed bool) {
	a := x.current
	if a.recorded || x.response.status >= http.StatusBadRequest {
		return
	}
	a.recorded = true
	if streamed {
		a.ttft = time.Since(a.sent)
		x.g.metrics.firstToken(a.id.Addr, a.decision.ExpectedTTFT, a.ttft)
		if x.promptTokens > 0 {
			a.lease.FirstToken(a.ttft)
		} else {
			a.lease.FirstToken(0) // the length was a guess: nothing to learn from
		}
	}
	for _, hashes := range a.chains {
		if len(hashes) > 0 {
			x.g.index.Record(a.id, hashes)
			x.g.metrics.records[recordPrompt].Inc()
		}
	}
	for _, f := range a.flights {
		x.g.pending.remove(f)
	}
	a.flights = nil
}

// end closes the account: metrics, the access line, and the broken connection that a broken answer calls for.
func (x *exchange) end() {
	g := x.g
	g.metrics.inFlight.Dec()
	took := time.Since(x.start)
	g.metrics.requests.WithLabelValues(x.endpoint.String(), x.label, string(x.result)).Inc()
	g.metrics.seconds.WithLabelValues(x.endpoint.String()).Observe(took.Seconds())
	usage, counted := x.response.answer.Usage, x.response.answer.HasUsage
	a := x.current
	if counted && a.lease != nil {
		g.metrics.completionTokens.WithLabelValues(a.id.Addr).Add(float64(usage.CompletionTokens))
		if x.promptTokens > 0 && len(x.req.Images) == 0 && usage.PromptTokens != x.promptTokens {
			g.metrics.miscounted.WithLabelValues(a.id.Addr).Inc()
		}
		// Of several prompts engines report the cached tokens of one.
		if len(a.chains) == 1 && usage.CachedKnown && x.result == outcomeOK {
			g.metrics.predicted(a.id.Addr, x.promptTokens, a.believed.tokens, usage.CachedTokens)
		}
	}
	if g.access != nil && g.access.Enabled(context.Background(), slog.LevelInfo) {
		attrs := make([]slog.Attr, 0, 20)
		attrs = append(attrs,
			slog.String("request_id", x.id),
			slog.String("endpoint", x.endpoint.String()),
			slog.String("model", x.label),
			slog.String("replica", a.id.Addr),
			slog.String("reason", string(a.decision.Reason)),
			slog.Int("prompt_tokens", x.promptTokens),
			slog.Int("matched_blocks", a.believed.blocks),
			slog.Int64("decide_us", x.decided.Microseconds()),
			slog.Float64("ttft_ms", milliseconds(a.ttft)),
			slog.Float64("took_ms", milliseconds(took)),
			slog.Int("status", x.status),
			slog.String("outcome", string(x.result)),
			slog.Int("attempts", x.forwarded.Attempts),
		)
		if counted && usage.CachedKnown {
			attrs = append(attrs, slog.Int("cached_tokens", usage.CachedTokens))
		}
		if x.loadOnly != "" {
			attrs = append(attrs, slog.String("load_only", string(x.loadOnly)))
		}
		if x.code != "" {
			attrs = append(attrs, slog.String("code", x.code))
		}
		if x.err != nil {
			attrs = append(attrs, slog.String("err", x.err.Error()))
		}
		g.access.LogAttrs(context.Background(), slog.LevelInfo, "request", attrs...)
	}
	x.encoded.Release()
	surveys.Put(x.survey)
	x.survey = nil
	if x.forwarded.Abort {
		panic(http.ErrAbortHandler)
	}
}

func milliseconds(d time.Duration) float64 {
	return float64(d.Microseconds()) / 1000
}

// debugHeaders shows the decision to a client that asks, where the configuration allows it.
func (x *exchange) debugHeaders(h http.Header) {
	if !x.g.server.DebugHeaders || x.r.Header.Get(debugHeader) != "1" {
		return
	}
	a := x.current
	h.Set(debugPrefix+"Replica", a.id.Addr)
	h.Set(debugPrefix+"Reason", string(a.decision.Reason))
	h.Set(debugPrefix+"Prompt-Tokens", strconv.Itoa(x.promptTokens))
	h.Set(debugPrefix+"Matched-Tokens", strconv.Itoa(a.believed.tokens))
}

const (
	debugHeader = "X-Prefixgate-Debug"
	debugPrefix = "X-Prefixgate-"
)

// response watches the answer go by. It implements proxy.Observer.
type response struct {
	x       *exchange
	status  int
	scanner *openai.AnswerScanner // nil for an answer that is not read
	stream  bool
	answer  openai.Answer // once it is over
}

var _ proxy.Observer = (*response)(nil)

// Header is called before anything is sent to the client.
func (o *response) Header(status int, h http.Header) {
	x := o.x
	o.status = status
	h.Set(requestIDHeader, x.id)
	x.debugHeaders(h)
	if status != http.StatusOK || (x.endpoint != openai.Chat && x.endpoint != openai.Completions) {
		return
	}
	o.stream = isEventStream(h)
	if o.stream && h.Get("Content-Encoding") != "" {
		return // compressed: its first piece must do for its first token
	}
	o.scanner = openai.NewAnswerScanner(x.endpoint, h.Get("Content-Type"), x.keepText())
}

// Chunk is called for each piece of the answer.
func (o *response) Chunk(p []byte) {
	first := o.stream && o.scanner == nil
	if o.scanner != nil {
		first = o.scanner.Scan(p) && o.stream
	}
	if first {
		o.x.firstToken(true)
	}
}

// end reads what only the end of an answer tells.
func (o *response) end() {
	if o.scanner != nil {
		o.answer = o.scanner.End()
	}
}

// incomplete says that a stream came to an orderly end, but without its end mark.
func (o *response) incomplete() bool {
	return o.scanner != nil && o.stream && !o.answer.Done
}

func isEventStream(h http.Header) bool {
	kind, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(kind), "text/event-stream")
}
