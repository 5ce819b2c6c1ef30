// Package sim is a simulated LLM server: what an engine's KV cache holds and when its tokens come, without computing any.
//
// Cache follows vLLM's rules for blocks to the letter, because whatever the gateway predicts is measured against it. Engine is
// the scheduler around it, a state machine in virtual time: in go requests and a time, out come events and the time of the next
// one. It has no goroutine, no clock and no randomness, so that a replay of a million requests gives the same figures every time,
// and a server (package simhttp) only has to let real time pass between its calls.
//
// What is simplified: one prompt is computed at a time, at a constant rate, and neither slows the answers that are being decoded nor
// is slowed by them; an answer's tokens come at a constant rate. Real engines mix both into one batch. The blocks of a prompt are taken
// when its computing starts, not chunk by chunk.
package sim

import (
	"errors"
	"fmt"
	"math"
	"time"

	"prefixgate/internal/block"
)

// Options describe an engine. The zero value works.
type Options struct {
	// BlockTokens is the size of a KV cache block in tokens. Default 16.
	BlockTokens int `yaml:"block_tokens"`
	// NumBlocks is the size of the KV cache in blocks, one of which is never used. Default 8192.
	NumBlocks int `yaml:"num_blocks"`
	// PrefillRate is how many uncached prompt tokens are computed in a second. +Inf: at once. Default 8000.
	PrefillRate float64 `yaml:"prefill_rate"`
	// DecodeRate is how many tokens a second each running request produces after its first. +Inf: all with the first. Default 50.
	DecodeRate float64 `yaml:"decode_rate"`
	// MaxRunning is how many requests can be computing or decoding at once (vLLM's max_num_seqs). Default 256.
	MaxRunning int `yaml:"max_running"`
}

// Validate returns everything that is wrong with the options, joined.
func (o Options) Validate() error {
	var errs []error
	if o.BlockTokens < 0 {
		errs = append(errs, fmt.Errorf("block_tokens: got %d, want at least 1 (0 means 16)", o.BlockTokens))
	}
	if o.NumBlocks < 0 || o.NumBlocks == 1 || o.NumBlocks > math.MaxInt32 {
		errs = append(errs, fmt.Errorf("num_blocks: got %d, want 2 to %d (0 means 8192)", o.NumBlocks, math.MaxInt32))
	}
	if o.PrefillRate < 0 || math.IsNaN(o.PrefillRate) {
		errs = append(errs, fmt.Errorf("prefill_rate: got %v, want a number of tokens per second (0 means 8000)", o.PrefillRate))
	}
	if o.DecodeRate < 0 || math.IsNaN(o.DecodeRate) {
		errs = append(errs, fmt.Errorf("decode_rate: got %v, want a number of tokens per second (0 means 50)", o.DecodeRate))
	}
	if o.MaxRunning < 0 {
		errs = append(errs, fmt.Errorf("max_running: got %d, want at least 1 (0 means 256)", o.MaxRunning))
	}
	return errors.Join(errs...)
}

// WithDefaults returns the options with every zero value replaced by its default.
func (o Options) WithDefaults() Options {
	if o.BlockTokens == 0 {
		o.BlockTokens = 16
	}
	if o.NumBlocks == 0 {
		o.NumBlocks = 8192
	}
	if o.PrefillRate == 0 {
		o.PrefillRate = 8000
	}
	if o.DecodeRate == 0 {
		o.DecodeRate = 50
	}
	if o.MaxRunning == 0 {
		o.MaxRunning = 256
	}
	return o
}

// Request is what an engine has to know of a request.
type Request struct {
	// ID names the request in events; no two requests in the engine may share one.
	ID uint64
	// PromptTokens is the length of the prompt, at least 1.
	PromptTokens int
	// OutputTokens is how many tokens will be generated, at least 1, if the request is not aborted.
	OutputTokens int
	// Chain are the hashes of the full blocks of the prompt followed by the answer, as far as they are known: at least those of the
	// prompt for it to be cached at all. Blocks beyond it, such as those of an unknown answer, are stored under hashes of their own, which no
	// prompt will ever match. The engine keeps the slice until the request is done and does not change it.
	Chain []block.Hash
	// EachToken asks for an event per generated token, not only for the first one and the end.
	EachToken bool
	// NoRead makes the request compute its whole prompt, as vLLM does for prompt_logprobs. It is cached all the same.
	NoRead bool
}

// Kind says what happened to a request.
type Kind uint8

// The kinds of Event.
const (
	// FirstToken: the prompt has been computed and the first token generated.
	FirstToken Kind = iota + 1
	// Token: a further token was generated; only with Request.EachToken.
	Token
	// Done: the last token was generated, with the FirstToken or Token event before it, and the blocks were freed.
	Done
)

// Event is something that happened to a request at a time.
type Event struct {
	Kind Kind
	ID   uint64
	// At is the virtual time.
	At time.Duration
	// CachedTokens is how many prompt tokens came from the cache when the prompt was first computed; in every event.
	CachedTokens int
	// Tokens is how many tokens have been generated so far.
	Tokens int
}

// Stats are an engine's counts since its start, and its present state.
type Stats struct {
	// Running counts requests that are being computed or decoded, Waiting those before them.
	Running, Waiting int
	// UsedBlocks of UsableBlocks are in use by running requests; StoredBlocks different ones can be found.
	UsedBlocks, UsableBlocks, StoredBlocks int
	// WaitingTokens is the sum of the prompt tokens of waiting requests, cached or not.
	WaitingTokens int64
	// PromptTokens, CachedTokens and GeneratedTokens count tokens of requests that got as far as their first token.
	PromptTokens, CachedTokens, GeneratedTokens int64
	// QueriedTokens and HitTokens count prompt tokens looked up in the cache and found there, when their computing starts.
	QueriedTokens, HitTokens int64
	// Submitted, Finished and Aborted count requests.
	Submitted, Finished, Aborted int64
	// Preemptions counts how often a running request lost its blocks to an older one and went back to the queue.
	Preemptions int64
	// Evictions counts blocks that lost their content to something new.
	Evictions int64
}

// KVUsage returns the part of the cache in use by running requests, 0 to 1.
func (s Stats) KVUsage() float64 {
	if s.UsableBlocks == 0 {
		return 0
	}
	return float64(s.UsedBlocks) / float64(s.UsableBlocks)
}

// ErrNeverFits is returned for a request that would need more blocks than the whole cache has.
var ErrNeverFits = errors.New("request needs more KV cache blocks than there are")

// running is a request inside the engine.
type running struct {
	Request
	blocks []BlockID
	// admitted orders running requests by the start of their computing.
	admitted uint64
	// generated is how many tokens had been generated at the last event.
	generated int
	// stored is how many leading blocks were given to Cache.Store, or came from it.
	stored int
	// cached is Event.CachedTokens, set when the request is lookedUp: once, however often it is preempted.
	cached   int
	lookedUp bool
	// computed is the first token index that the running prefill computes; started its beginning.
	computed int
	started  time.Duration
	// base is the time of token baseTokens, from which later tokens are timed, so that roundings do not add up.
	base       time.Duration
	baseTokens int
	// at is the time of the next event, when nextTokens tokens will have been generated; heapAt its place in the heap.
	at         time.Duration
	nextTokens int
	heapAt     int
}

// Engine schedules requests over a Cache in virtual time. Times are offsets from any one epoch and must never go back from call to call. An
// Engine is not safe for concurrent use.
type Engine struct {
	opts  Options
	cache *Cache
	now   time.Duration

	// waiting is a queue that starts at waitingHead; preempted requests go to its front.
	waiting     []*running
	waitingHead int
	// prefill is the one request whose prompt is being computed, until prefillEnd.
	prefill    *running
	prefillEnd time.Duration
	// decoding is a heap by (at, admitted).
	decoding []*running
	byID     map[uint64]*running
	admitted uint64
	stats    Stats
	// spare are ended requests, kept for their memory.
	spare []*running
	// out collects what a call produces beyond its own return value.
	out []Event
}

// NewEngine returns an idle engine with an empty cache. The options must be valid.
func NewEngine(opts Options) *Engine {
	opts = opts.WithDefaults()
	return &Engine{opts: opts, cache: NewCache(opts.NumBlocks), byID: make(map[uint64]*running)}
}

// Options returns the engine's options with defaults filled in.
func (e *Engine) Options() Options { return e.opts }

// Match returns how many of the prompt's tokens would come from the cache if its computing started now.
func (e *Engine) Match(chain []block.Hash, promptTokens int) int {
	limit := min(len(chain), block.Hittable(promptTokens, e.opts.BlockTokens))
	return e.cache.Match(chain[:limit]) * e.opts.BlockTokens
}

// Stats returns the present counts.
func (e *Engine) Stats() Stats {
	s := e.stats
	s.Running = len(e.decoding)
	if e.prefill != nil {
		s.Running++
	}
	s.Waiting = len(e.waiting) - e.waitingHead
	s.UsedBlocks, s.UsableBlocks, s.StoredBlocks = e.cache.Used(), e.cache.Usable(), e.cache.Stored()
	s.Evictions = e.cache.Evictions()
	return s
}

// Submit gives the engine a request at time now. Events that are due before now are kept for the next Advance, which should have been
// called up to now first. It fails for a request that could never run: with ErrNeverFits, or because it has no token or a doubled ID.
func (e *Engine) Submit(now time.Duration, r Request) error {
	if r.PromptTokens < 1 || r.OutputTokens < 1 {
		return fmt.Errorf("submit request of %d prompt and %d output tokens: want at least 1 of each", r.PromptTokens, r.OutputTokens)
	}
	if e.slots(r.PromptTokens+r.OutputTokens-1) > e.cache.Usable() {
		return ErrNeverFits
	}
	if _, ok := e.byID[r.ID]; ok {
		return fmt.Errorf("submit request %d: it is already in the engine", r.ID)
	}
	e.advance(now)
	q := e.get()
	q.Request = r
	e.byID[r.ID] = q
	e.waiting = append(e.waiting, q)
	e.stats.Submitted++
	e.stats.WaitingTokens += int64(r.PromptTokens)
	e.schedule()
	return nil
}

// Abort takes a request out at time now, whatever its state, and frees its blocks at once; what it computed so far stays cached. No
// further event of it will come. It returns false if there is no such request (any more).
func (e *Engine) Abort(now time.Duration, id uint64) bool {
	e.advance(now)
	q, ok := e.byID[id]
	if !ok {
		return false
	}
	switch {
	case q == e.prefill:
		e.storePartialPrefill(q)
		e.prefill = nil
		e.cache.Release(q.blocks)
	case q.heapAt >= 0:
		e.heapRemove(q)
		e.catchUp(q)
		e.store(q, q.PromptTokens+q.generated-1)
		e.cache.Release(q.blocks)
	default:
		e.dequeue(q)
	}
	e.stats.Aborted++
	e.put(q)
	// Events of it that are due but were not yet handed out are of no use to anyone.
	kept := e.out[:0]
	for _, ev := range e.out {
		if ev.ID != id {
			kept = append(kept, ev)
		}
	}
	e.out = kept
	e.schedule()
	return true
}

// Next returns the time of the next event or internal step; ok is false if nothing will happen without a new request.
func (e *Engine) Next() (at time.Duration, ok bool) {
	if len(e.out) > 0 {
		return e.now, true
	}
	return e.next()
}

// Advance lets time pass until now and appends to dst what happened, in order of time. Now and then nothing has: a step was internal.
func (e *Engine) Advance(now time.Duration, dst []Event) []Event {
	e.advance(now)
	dst = append(dst, e.out...)
	e.out = e.out[:0]
	return dst
}

// ResetCache forgets all cached blocks; it is refused, with false, while a request runs.
func (e *Engine) ResetCache() bool { return e.cache.Reset() }

func (e *Engine) next() (at time.Duration, ok bool) {
	if e.prefill != nil {
		at, ok = e.prefillEnd, true
	}
	if len(e.decoding) > 0 && (!ok || e.decoding[0].at < at) {
		at, ok = e.decoding[0].at, true
	}
	return at, ok
}

func (e *Engine) advance(now time.Duration) {
	for {
		at, ok := e.next()
		if !ok || at > now {
			break
		}
		e.now = max(e.now, at)
		// At equal times decoding goes first: it frees blocks that the next prompt can use.
		if len(e.decoding) > 0 && e.decoding[0].at == at {
			e.stepDecode(e.decoding[0])
		} else {
			e.endPrefill()
		}
	}
	e.now = max(e.now, now)
}

// slots returns how many blocks hold n tokens.
func (e *Engine) slots(n int) int { return (n + e.opts.BlockTokens - 1) / e.opts.BlockTokens }

// schedule starts the next prompt if one is waiting and there is room for it.
func (e *Engine) schedule() {
	if e.prefill != nil || e.waitingHead == len(e.waiting) || len(e.decoding) >= e.opts.MaxRunning {
		return
	}
	q := e.waiting[e.waitingHead]
	// A request that was preempted computes the tokens it had generated again, as part of its prompt.
	n := q.PromptTokens + q.generated
	limit := min(len(q.Chain), block.Hittable(n, e.opts.BlockTokens))
	if q.NoRead {
		limit = 0
	}
	blocks, hits, ok := e.cache.Acquire(q.blocks[:0], q.Chain[:limit], e.slots(n))
	q.blocks = blocks
	if !ok {
		return // The end of a running request frees blocks and brings us back here.
	}
	e.waiting[e.waitingHead] = nil
	e.waitingHead++
	if e.waitingHead > len(e.waiting)/2 {
		n := copy(e.waiting, e.waiting[e.waitingHead:])
		clear(e.waiting[n:])
		e.waiting, e.waitingHead = e.waiting[:n], 0
	}
	e.stats.WaitingTokens -= int64(q.PromptTokens)
	e.admitted++
	q.admitted = e.admitted
	q.stored = hits
	q.computed = hits * e.opts.BlockTokens
	q.started = e.now
	if !q.lookedUp {
		q.lookedUp = true
		q.cached = q.computed
		e.stats.QueriedTokens += int64(n)
		e.stats.HitTokens += int64(q.computed)
	}
	e.prefill = q
	e.prefillEnd = e.now + seconds(float64(n-q.computed)/e.opts.PrefillRate)
}

func (e *Engine) endPrefill() {
	q := e.prefill
	e.prefill = nil
	e.store(q, q.PromptTokens+q.generated)
	if q.generated == 0 {
		e.stats.PromptTokens += int64(q.PromptTokens)
		e.stats.CachedTokens += int64(q.cached)
	}
	q.generated++
	e.stats.GeneratedTokens++
	q.base, q.baseTokens = e.now, q.generated
	switch {
	case q.generated == 1:
		e.emit(FirstToken, q)
	case q.EachToken:
		e.emit(Token, q)
	}
	if e.afterToken(q) {
		e.plan(q)
		e.heapPush(q)
	}
	e.schedule()
}

// stepDecode takes a decoding request to the token it was planned for.
func (e *Engine) stepDecode(q *running) {
	e.stats.GeneratedTokens += int64(q.nextTokens - q.generated)
	q.generated = q.nextTokens
	if q.EachToken {
		e.emit(Token, q)
	}
	e.heapRemove(q)
	if e.afterToken(q) {
		e.plan(q)
		e.heapPush(q)
	}
	e.schedule()
}

// afterToken ends a request that has all its tokens, or gives it the block that its next token needs. It returns false if the request no
// longer runs; it must not be in the heap.
func (e *Engine) afterToken(q *running) bool {
	slots := q.PromptTokens + q.generated - 1 // The last token's keys and values are computed by the step after it.
	if q.generated == q.OutputTokens {
		e.store(q, slots)
		e.cache.Release(q.blocks)
		e.emit(Done, q)
		e.stats.Finished++
		e.put(q)
		return false
	}
	if slots%e.opts.BlockTokens != 0 {
		return true
	}
	e.store(q, slots)
	for {
		if id, ok := e.cache.Grow(); ok {
			q.blocks = append(q.blocks, id)
			return true
		}
		// vLLM takes the blocks of the request that started last, be it the one in need.
		victim := q
		if e.prefill != nil && e.prefill.admitted > victim.admitted {
			victim = e.prefill
		}
		for _, d := range e.decoding {
			if d.admitted > victim.admitted {
				victim = d
			}
		}
		e.preempt(victim)
		if victim == q {
			return false
		}
	}
}

// preempt takes a running request's blocks away and puts it at the front of the queue.
func (e *Engine) preempt(q *running) {
	switch {
	case q == e.prefill:
		e.storePartialPrefill(q)
		e.prefill = nil
	case q.heapAt >= 0:
		e.heapRemove(q)
		e.catchUp(q)
		e.store(q, q.PromptTokens+q.generated-1)
	}
	e.cache.Release(q.blocks)
	q.blocks = q.blocks[:0]
	e.stats.Preemptions++
	e.stats.WaitingTokens += int64(q.PromptTokens)
	if e.waitingHead > 0 {
		e.waitingHead--
		e.waiting[e.waitingHead] = q
		return
	}
	e.waiting = append(e.waiting, nil)
	copy(e.waiting[1:], e.waiting)
	e.waiting[0] = q
}

// plan sets the time of a decoding request's next event: its next token if each is wanted, else the next block or its end.
func (e *Engine) plan(q *running) {
	next := q.generated + 1
	if !q.EachToken {
		// The next number of tokens after which all its blocks are full.
		b := e.opts.BlockTokens
		filled := q.PromptTokens + q.generated - 1
		next = min(q.generated+b-filled%b, q.OutputTokens)
	}
	q.nextTokens = next
	q.at = q.base + seconds(float64(next-q.baseTokens)/e.opts.DecodeRate)
}

// catchUp counts the tokens that a request, about to be interrupted, has generated since its last event. A request with an event for
// each token has none: a token that is due at this very instant is not generated any more, else its event would be missing.
func (e *Engine) catchUp(q *running) {
	if q.EachToken {
		return
	}
	tokens := q.OutputTokens - 1 // The last one would have ended it.
	if n := (e.now - q.base).Seconds() * e.opts.DecodeRate; n < float64(tokens-q.baseTokens) {
		tokens = q.baseTokens + int(n)
	}
	if tokens > q.generated {
		e.stats.GeneratedTokens += int64(tokens - q.generated)
		q.generated = tokens
	}
}

// storePartialPrefill caches the blocks that an unfinished prefill has computed by now.
func (e *Engine) storePartialPrefill(q *running) {
	n := q.PromptTokens + q.generated
	done := (e.now - q.started).Seconds() * e.opts.PrefillRate
	if math.IsNaN(done) || done > float64(n-q.computed) {
		done = float64(n - q.computed)
	}
	e.store(q, q.computed+int(done))
}

// store caches the full blocks among the first tokens of a request.
func (e *Engine) store(q *running, tokens int) {
	for full := tokens / e.opts.BlockTokens; q.stored < full; q.stored++ {
		e.cache.Store(q.blocks[q.stored], q.hash(q.stored))
	}
}

// hash names a block of a request, beyond its chain by a hash that is its own.
func (q *running) hash(i int) block.Hash {
	if i < len(q.Chain) {
		return q.Chain[i]
	}
	return block.Hash(mix(mix(q.ID+0x9e3779b97f4a7c15) ^ uint64(i)))
}

// mix is the finalizer of splitmix64: a bijection that scatters consecutive numbers.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

func (e *Engine) emit(kind Kind, q *running) {
	e.out = append(e.out, Event{Kind: kind, ID: q.ID, At: e.now, CachedTokens: q.cached, Tokens: q.generated})
}

// dequeue takes a request out of the waiting queue.
func (e *Engine) dequeue(q *running) {
	for i := e.waitingHead; i < len(e.waiting); i++ {
		if e.waiting[i] == q {
			e.waiting = append(e.waiting[:i], e.waiting[i+1:]...)
			e.stats.WaitingTokens -= int64(q.PromptTokens)
			return
		}
	}
	panic("BUG: a request is neither running nor waiting")
}

func (e *Engine) get() *running {
	if n := len(e.spare); n > 0 {
		q := e.spare[n-1]
		e.spare = e.spare[:n-1]
		return q
	}
	return &running{heapAt: -1}
}

func (e *Engine) put(q *running) {
	delete(e.byID, q.ID)
	*q = running{blocks: q.blocks[:0], heapAt: -1}
	e.spare = append(e.spare, q)
}

// seconds converts without overflowing for rates next to nothing.
func seconds(s float64) time.Duration {
	if s >= math.MaxInt64/float64(time.Second)/2 {
		return math.MaxInt64 / 2
	}
	return time.Duration(s * float64(time.Second))
}

func (e *Engine) less(i, j int) bool {
	a, b := e.decoding[i], e.decoding[j]
	if a.at != b.at {
		return a.at < b.at
	}
	return a.admitted < b.admitted
}

func (e *Engine) swap(i, j int) {
	d := e.decoding
	d[i], d[j] = d[j], d[i]
	d[i].heapAt, d[j].heapAt = i, j
}

func (e *Engine) heapPush(q *running) {
	q.heapAt = len(e.decoding)
	e.decoding = append(e.decoding, q)
	e.up(q.heapAt)
}

func (e *Engine) heapRemove(q *running) {
	i, last := q.heapAt, len(e.decoding)-1
	if i != last {
		e.swap(i, last)
	}
	e.decoding[last] = nil
	e.decoding = e.decoding[:last]
	if i != last {
		e.up(i)
		e.down(i)
	}
	q.heapAt = -1
}

func (e *Engine) up(i int) {
	for i > 0 && e.less(i, (i-1)/2) {
		e.swap(i, (i-1)/2)
		i = (i - 1) / 2
	}
}

func (e *Engine) down(i int) {
	for {
		least := i
		for c := 2*i + 1; c <= 2*i+2 && c < len(e.decoding); c++ {
			if e.less(c, least) {
				least = c
			}
		}
		if least == i {
			return
		}
		e.swap(i, least)
		i = least
	}
}
