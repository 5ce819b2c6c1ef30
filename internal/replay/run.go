package replay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"prefixgate/internal/block"
	"prefixgate/internal/index"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/sim"
)

// Options describe the world that a workload is run in.
type Options struct {
	// Replicas is the number of engines. Default 8.
	Replicas int
	// PrefillRate is each engine's speed for prompts, one after another, in tokens per second. Default 8000. DecodeRate is the
	// speed of each answer in tokens per second; 0 means that answers cost nothing: a request ends with its first token.
	PrefillRate, DecodeRate float64
	// CacheBlocks is the size of each engine's KV cache in blocks. Default 2000.
	CacheBlocks int
	// Gateways is how many gateways share the requests, each with a policy of its own. Default 1.
	Gateways int
	// Staleness is how late a gateway learns what the others did: their records in the index and their load. 0: at once.
	Staleness time.Duration
	// Ticks says what to make of requests with equal timestamps. Default TicksOrdered.
	Ticks Ticks
	// Random gives each request to a random gateway; by default the gateways take turns, as behind a balancer.
	Random bool
	// ScrapeInterval is how often an engine's own metrics are read. Default 1s.
	ScrapeInterval time.Duration
	// Exact takes matches from the engines' caches instead of the index, as if KV events told the gateways everything at once.
	Exact bool
	// Seed decides which gateway gets which request, and what policies draw.
	Seed uint64
	// Progress, if set, is called now and then with the number of requests that have arrived.
	Progress func(requests int)
}

// Ticks says how requests that a trace gives one timestamp arrive. The clock of the Mooncake traces, for example, ticks every 3
// seconds, with 10 requests in each tick that were really up to 3 seconds apart.
type Ticks string

// The kinds of Ticks.
const (
	// TicksOrdered submits all requests of a tick at its timestamp, but lets gateways hear of each other in between as if
	// the requests were spread over the tick: a staleness far below the tick's length does not blind them to each other.
	TicksOrdered Ticks = "ordered"
	// TicksSpread spreads the arrivals themselves over the tick.
	TicksSpread Ticks = "spread"
	// TicksTogether takes the timestamps literally: all requests of a tick arrive in one instant, in which no gateway hears
	// of another.
	TicksTogether Ticks = "together"
)

func (o Options) withDefaults() Options {
	if o.Replicas == 0 {
		o.Replicas = 8
	}
	if o.PrefillRate == 0 {
		o.PrefillRate = 8000
	}
	if o.DecodeRate == 0 {
		o.DecodeRate = math.Inf(1)
	}
	if o.CacheBlocks == 0 {
		o.CacheBlocks = 2000
	}
	if o.Gateways == 0 {
		o.Gateways = 1
	}
	if o.Ticks == "" {
		o.Ticks = TicksOrdered
	}
	if o.ScrapeInterval == 0 {
		o.ScrapeInterval = time.Second
	}
	return o
}

// Validate returns all that is wrong with the options, joined.
func (o Options) Validate() error {
	o = o.withDefaults()
	var errs []error
	want := func(ok bool, name string, got any, what string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: got %v, want %s", name, got, what))
		}
	}
	want(o.Replicas >= 1 && o.Replicas <= 10_000, "replicas", o.Replicas, "1 to 10000")
	want(o.PrefillRate > 0, "prefill-rate", o.PrefillRate, "tokens per second above 0")
	want(o.DecodeRate > 0, "decode-rate", o.DecodeRate, "tokens per second, or 0 for answers that cost nothing")
	want(o.CacheBlocks >= 2, "cache-blocks", o.CacheBlocks, "at least 2")
	want(o.Gateways >= 1 && o.Gateways <= 10_000, "gateways", o.Gateways, "1 to 10000")
	want(slices.Contains([]Ticks{TicksOrdered, TicksSpread, TicksTogether}, o.Ticks), "ticks", o.Ticks, "ordered, spread or together")
	want(o.Staleness >= 0, "staleness", o.Staleness, "a duration of at least 0")
	want(o.ScrapeInterval > 0, "scrape-interval", o.ScrapeInterval, "a duration above 0")
	return errors.Join(errs...)
}

// share is what one gateway has on one replica.
type share struct {
	tokens   int64 // Of prompts that have not had their first token.
	prompts  int32 // Their number.
	requests int32 // All requests.
	// head is when the replica began to work on the first of the prompts, as far as is known here.
	head time.Duration
}

// add applies a change.
func (s *share) add(c *change) {
	switch {
	case c.prompts < 0:
		s.head = max(s.head, c.happened)
	case s.prompts == 0 && c.prompts > 0:
		s.head = max(s.head, c.happened)
	}
	s.tokens += c.tokens
	s.prompts += c.prompts
	s.requests += c.requests
}

// change is something that happened at a gateway and that the others learn later.
type change struct {
	at       time.Duration // When the others learn it.
	happened time.Duration
	known    time.Duration // When it happened by the offsets of TicksOrdered.
	gateway  int32
	replica  int32
	tokens   int64
	prompts  int32
	requests int32
	record   []block.Hash // If set, the replica is now believed to hold this.
}

// pending is a request between dispatch and end.
type pending struct {
	at        time.Duration
	gateway   int32
	replica   int32
	queued    int64 // Its share of the replica's queued tokens until the first token.
	predicted int   // Matched tokens.
	expected  time.Duration
	prompt    int
}

// world is the state of one run.
type world struct {
	opts     Options
	blocks   int // Tokens per block.
	now      time.Duration
	engines  []*sim.Engine
	due      *schedule
	policies []route.Policy
	rng      *rand.Rand

	candidates []route.Candidate // One per replica; what a scrape tells is kept here.
	holders    []index.Holder
	shared     *index.Memory   // What all gateways know: records older than the staleness.
	own        []*index.Memory // What a gateway itself recorded lately; nil if nothing is stale.
	match      []int
	ownMatch   []int

	local    []share // [gateway*replicas+replica], as the gateway itself knows it.
	told     []share // The same as the others know it.
	toldSum  []share // Its sum over gateways.
	changes  queue
	flight   map[uint64]pending
	loads    []int32 // Requests per replica, the truth.
	scraped  int     // The replica that is scraped next.
	scrapeAt time.Duration
	fills    []replica.FillRate

	result *Result
	events []sim.Event
}

// Run runs the workload with the policy that each gateway gets by its options, in virtual time. It stops early with the context's
// error. A request that no engine can hold is counted, not an error.
func Run(ctx context.Context, load Workload, policy route.Options, opts Options) (*Result, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	w, err := newWorld(load, policy, opts.withDefaults())
	if err != nil {
		return nil, err
	}
	return w.run(ctx, load)
}

// run lets time pass until everything has been answered.
func (w *world) run(ctx context.Context, load Workload) (*Result, error) {
	id := uint64(0)
	pull := func() (Request, bool) {
		r, ok := load.Next()
		switch w.opts.Ticks {
		case TicksSpread:
			r.At += r.Offset
			r.Offset = 0
		case TicksTogether:
			r.Offset = 0
		}
		return r, ok
	}
	next, more := pull()
	for {
		// At equal times what was known before comes first, then engines, then arrivals.
		at, what := time.Duration(1<<62), nothing
		if more {
			at, what = next.At, arrival
		}
		if t, ok := w.due.min(); ok && t <= at {
			at, what = t, engine
		}
		if what == nothing {
			break // All that remains is gateways telling each other.
		}
		if w.scrapeAt <= at {
			at, what = w.scrapeAt, scrape
		}
		if w.changes.some() && w.changes.first().at <= at {
			at, what = w.changes.first().at, telling
		}
		w.now = at
		switch what {
		case telling:
			w.tell()
		case scrape:
			w.scrape()
		case engine:
			w.advance()
		case arrival:
			id++
			if id%1024 == 0 {
				if err := ctx.Err(); err != nil {
					return nil, err
				}
				if w.opts.Progress != nil {
					w.opts.Progress(int(id))
				}
			}
			if err := w.arrive(id, &next); err != nil {
				return nil, err
			}
			next, more = pull()
		}
	}
	if w.opts.Progress != nil {
		w.opts.Progress(int(id))
	}
	w.result.finish(w)
	return w.result, nil
}

// What happens next.
const (
	nothing = iota
	telling
	scrape
	engine
	arrival
)

func newWorld(load Workload, policy route.Options, opts Options) (*world, error) {
	n, g := opts.Replicas, opts.Gateways
	w := &world{
		opts:       opts,
		blocks:     load.BlockTokens(),
		engines:    make([]*sim.Engine, n),
		due:        newSchedule(n),
		policies:   make([]route.Policy, g),
		rng:        rand.New(rand.NewPCG(opts.Seed, 0x6761746577617973)),
		candidates: make([]route.Candidate, n),
		holders:    make([]index.Holder, n),
		match:      make([]int, n),
		ownMatch:   make([]int, n),
		local:      make([]share, n*g),
		told:       make([]share, n*g),
		toldSum:    make([]share, n),
		flight:     make(map[uint64]pending),
		loads:      make([]int32, n),
		fills:      make([]replica.FillRate, n),
	}
	engine := sim.Options{
		BlockTokens: w.blocks,
		NumBlocks:   opts.CacheBlocks,
		PrefillRate: opts.PrefillRate,
		DecodeRate:  opts.DecodeRate,
	}
	if err := engine.Validate(); err != nil {
		return nil, fmt.Errorf("engine: %w", err)
	}
	for i := range n {
		id := replica.ID{Addr: fmt.Sprintf("http://replica-%d:8000", i), Start: 1}
		w.engines[i] = sim.NewEngine(engine)
		w.holders[i] = index.Holder{ID: id}
		w.candidates[i] = route.Candidate{ID: id, Healthy: true, MetricsFresh: true}
	}
	for i := range g {
		// Round robins start evenly spread over the replicas.
		policy.Seed = mix(opts.Seed^mix(uint64(i)))>>32*uint64(n) + uint64(i*n/g)
		p, err := route.New(policy)
		if err != nil {
			return nil, err
		}
		w.policies[i] = p
	}
	io := index.Options{Clock: w.clock, MaxMemoryBytes: 4 << 30}
	w.shared = index.NewMemory(io, prometheus.NewRegistry())
	if w.stale() {
		// A gateway's own records bridge the time until they are shared.
		io.TTL = 2*opts.Staleness + time.Second
		w.own = make([]*index.Memory, g)
		for i := range w.own {
			w.own[i] = index.NewMemory(io, prometheus.NewRegistry())
		}
	}
	w.result = newResult(w, w.policies[0].Name(), load.Len())
	return w, nil
}

// stale says whether gateways know less of each other than of themselves.
func (w *world) stale() bool { return w.opts.Gateways > 1 && w.opts.Staleness > 0 }

// epoch is the time of day at which virtual time starts; any one does.
var epoch = time.Unix(1_800_000_000, 0)

func (w *world) clock() time.Time { return epoch.Add(w.now) }

// arrive routes one request and submits it.
func (w *world) arrive(id uint64, r *Request) error {
	g := int((id - 1) % uint64(w.opts.Gateways))
	if w.opts.Random {
		g = w.rng.IntN(w.opts.Gateways)
	}
	for w.changes.some() && w.changes.first().known+w.opts.Staleness <= r.At+r.Offset {
		w.tell()
	}
	start := time.Now()
	hittable := min(len(r.Chain), block.Hittable(r.PromptTokens, w.blocks))
	chain := r.Chain[:hittable]
	w.matches(g, chain, r.PromptTokens)
	local, told := w.local[g*w.opts.Replicas:], w.told[g*w.opts.Replicas:]
	for i := range w.candidates {
		c := &w.candidates[i]
		c.MatchedTokens = w.match[i] * w.blocks
		sum, told, own := &w.toldSum[i], &told[i], &local[i]
		c.QueuedTokens = sum.tokens - told.tokens + own.tokens
		c.QueuedPrompts = int(sum.prompts - told.prompts + own.prompts)
		c.QueueAge = w.now - max(sum.head, own.head)
		c.InFlight = int(sum.requests - told.requests + own.requests)
	}
	req := route.Request{
		PromptTokens: r.PromptTokens,
		Prefix:       prefixOf(r.Chain, w.blocks),
		TextPrefix:   r.TextPrefix,
		SimHash:      r.SimHash,
		Session:      r.Session,
	}
	d, ok := w.policies[g].Pick(&req, w.candidates)
	w.result.deciding += time.Since(start)
	if !ok {
		panic("BUG: no replica may be used")
	}
	e := w.engines[d.Index]
	err := e.Submit(w.now, sim.Request{ID: id, PromptTokens: r.PromptTokens, OutputTokens: r.OutputTokens, Chain: r.Chain})
	if errors.Is(err, sim.ErrNeverFits) {
		w.result.Refused++
		return nil
	}
	if err != nil {
		return err
	}
	p := pending{
		at: w.now, gateway: int32(g), replica: int32(d.Index),
		queued:    int64(r.PromptTokens - w.candidates[d.Index].MatchedTokens),
		predicted: w.candidates[d.Index].MatchedTokens,
		expected:  d.ExpectedTTFT,
		prompt:    r.PromptTokens,
	}
	w.flight[id] = p
	w.loads[d.Index]++
	w.result.dispatched(&p, d.Reason)
	w.reschedule(d.Index)
	w.change(change{known: w.now + r.Offset, gateway: p.gateway, replica: p.replica, tokens: p.queued, prompts: 1, requests: 1, record: r.Chain})
	return nil
}

// matches fills match with what gateway g believes of each replica.
func (w *world) matches(g int, chain []block.Hash, prompt int) {
	if w.opts.Exact {
		for i, e := range w.engines {
			w.match[i] = e.Match(chain, prompt) / w.blocks
		}
		return
	}
	// Memory never fails.
	_ = w.shared.Match(context.Background(), chain, w.holders, w.match)
	if w.own == nil {
		return
	}
	_ = w.own[g].Match(context.Background(), chain, w.holders, w.ownMatch)
	for i, n := range w.ownMatch {
		w.match[i] = max(w.match[i], n)
	}
}

// change applies what happened at a gateway: to itself at once, to the others after the staleness.
func (w *world) change(c change) {
	c.happened = w.now
	w.local[int(c.gateway)*w.opts.Replicas+int(c.replica)].add(&c)
	if c.record != nil && w.own != nil {
		w.own[c.gateway].Record(w.holders[c.replica].ID, c.record)
	}
	c.at = w.now
	if w.stale() {
		c.at += w.opts.Staleness
	}
	w.changes.push(c)
	if !w.stale() {
		w.tell()
	}
}

// tell makes the oldest change known to all.
func (w *world) tell() {
	c := w.changes.pop()
	w.told[int(c.gateway)*w.opts.Replicas+int(c.replica)].add(&c)
	w.toldSum[c.replica].add(&c)
	if c.record != nil {
		w.shared.Record(w.holders[c.replica].ID, c.record)
	}
}

// advance lets the engine that is due next do its step.
func (w *world) advance() {
	i := w.due.first()
	w.events = w.engines[i].Advance(w.now, w.events[:0])
	for _, ev := range w.events {
		p := w.flight[ev.ID]
		switch ev.Kind {
		case sim.FirstToken:
			w.result.firstToken(w, &p, ev)
			w.change(change{known: w.now, gateway: p.gateway, replica: p.replica, tokens: -p.queued, prompts: -1})
		case sim.Done:
			w.loads[i]--
			delete(w.flight, ev.ID)
			w.change(change{known: w.now, gateway: p.gateway, replica: p.replica, requests: -1})
		}
	}
	w.reschedule(i)
}

func (w *world) reschedule(i int) {
	at, ok := w.engines[i].Next()
	w.due.set(i, at, ok)
}

// scrape reads one engine's metrics. The engines are read one after another, each once an interval.
func (w *world) scrape() {
	i := w.scraped
	w.scraped = (i + 1) % w.opts.Replicas
	w.scrapeAt += max(1, w.opts.ScrapeInterval/time.Duration(w.opts.Replicas))
	e := w.engines[i]
	s := e.Stats()
	c := &w.candidates[i]
	c.Running, c.Waiting, c.KVUsage = s.Running, s.Waiting, s.KVUsage()
	filled := replica.FilledBlocks(float64(s.PromptTokens), float64(s.CachedTokens), float64(s.GeneratedTokens), w.blocks)
	w.fills[i].Observe(w.clock(), filled, float64(w.opts.CacheBlocks))
	w.holders[i].MaxAge = index.Residence(w.opts.CacheBlocks, w.fills[i].PerSecond())
	w.result.sample(w)
}
