package replica

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// FailureKind says how a request failed on a replica. The set is closed: it is a metric's label.
type FailureKind string

// The kinds of failures. A client's hanging up is none of them, and neither is any answer of the engine.
const (
	// FailureConnect: no connection could be made. Ejects at once.
	FailureConnect FailureKind = "connect"
	// FailureReset: the connection broke while the request was on it. Soft: several in a row eject.
	FailureReset FailureKind = "reset"
	// FailureFirstByte: no byte of an answer came in time. Soft.
	FailureFirstByte FailureKind = "first_byte"
	// failureStall: requests run and no counter moves. Found by scraping, not reported.
	failureStall FailureKind = "stall"
)

var failureKinds = [...]FailureKind{FailureConnect, FailureReset, FailureFirstByte, failureStall}

func (k FailureKind) index() int {
	return max(slices.Index(failureKinds[:], k), 0)
}

// instance is one replica from its appearance in the list to its removal; a replica that comes back is another instance.
// Its process may restart meanwhile.
type instance struct {
	fleet  *Fleet
	addr   string
	key    string
	weight float64

	// What the gateway has in flight. Only leases change it.
	inFlight atomic.Int64
	rate     rateEstimator

	// Counted for ever; read by the collector.
	restarts     atomic.Uint64
	ejections    [len(failureKinds)]atomic.Uint64
	scrapeErrors [len(polls)]atomic.Uint64

	probed chan struct{}      // Closed by the first verdict on the replica's health.
	kick   chan struct{}      // Asks for a poll of the health at once.
	stop   context.CancelFunc // Ends the polling goroutines; nil unless they run.

	mu sync.Mutex // Guards the fields below.

	draining bool

	prefillTokens int64     // Of the leases that wait for their first token.
	prompts       int       // Their number.
	began         time.Time // When the engine began with the first of them, as far as first tokens tell.

	up        bool // Verdict of the health path.
	judged    bool // There has been a verdict.
	pollFails int
	aliveAt   time.Time // It last answered a request, or told its metrics.
	healthy   bool      // As last logged.

	ejected    bool
	ejectKind  FailureKind
	ejectUntil time.Time
	ejectCount int  // Doubles the pause.
	soft       int  // Soft failures in a row.
	probation  bool // Back from a soft ejection: one request at a time until one succeeds.
	trials     int  // Leases taken on probation.

	start     int64 // ID.Start.
	load      sample
	scrapedAt time.Time // Zero before the first scrape.
	fresh     bool      // As last logged.
	warned    bool      // Missing metrics were logged.
	fill      FillRate
	progress  float64 // Sum of counters at the last progress.
	movedAt   time.Time
	models    []Model
	outdated  bool // The models are those of an earlier life.
}

func newInstance(f *Fleet, addr, key string, t Target) *instance {
	in := &instance{
		fleet: f, addr: addr, key: key, weight: t.Weight, draining: t.Draining,
		probed: make(chan struct{}), kick: make(chan struct{}, 1),
		load: sample{running: math.NaN(), waiting: math.NaN(), kvUsage: math.NaN()},
	}
	if in.weight == 0 {
		in.weight = 1
	}
	return in
}

// upLocked says whether the replica is in service, if only on probation.
func (in *instance) upLocked(now time.Time) bool {
	if !in.up || !in.ejected {
		return in.up
	}
	// Soft ejections end by themselves; a lost connection and a standstill must be seen to be over.
	return in.ejectKind != FailureConnect && in.ejectKind != failureStall && !now.Before(in.ejectUntil)
}

// onTrialLocked says that the replica is back from a soft ejection and gets one request at a time until one succeeds.
func (in *instance) onTrialLocked(now time.Time) bool {
	return in.upLocked(now) && (in.probation || in.ejected)
}

// usableLocked says whether the replica may get a request now, draining aside.
func (in *instance) usableLocked(now time.Time) bool {
	return in.upLocked(now) && (in.trials == 0 || !in.onTrialLocked(now))
}

// logHealthLocked logs the replica's health if it changed.
func (in *instance) logHealthLocked(now time.Time, why string) {
	up := in.upLocked(now)
	if up == in.healthy {
		return
	}
	in.healthy = up
	if up {
		in.fleet.log.Info("replica is healthy", "replica", in.addr, "why", why)
	} else {
		in.fleet.log.Warn("replica is not healthy", "replica", in.addr, "why", why)
	}
}

// judge takes in one poll of the health path that was sent at began.
func (in *instance) judge(began, now time.Time, v verdict, why string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.judged {
		in.judged = true
		close(in.probed)
	}
	if v == verdictSilent && in.aliveAt.After(began) {
		return
	}
	if v != verdictWell {
		in.pollFails++
		if v == verdictIll || in.pollFails >= in.fleet.opts.UnhealthyAfter {
			in.up = false
		}
		in.logHealthLocked(now, why)
		return
	}
	in.pollFails = 0
	in.up = true
	if in.ejected && !now.Before(in.ejectUntil) {
		switch in.ejectKind {
		case FailureConnect:
			in.ejected = false
		case FailureReset, FailureFirstByte:
			in.ejected, in.probation = false, true
		case failureStall: // Ends when the counters move.
		}
	}
	in.logHealthLocked(now, why)
}

// ejectLocked takes the replica out for a pause that doubles each time.
func (in *instance) ejectLocked(now time.Time, kind FailureKind) {
	if in.ejected && (now.Before(in.ejectUntil) || in.ejectKind == failureStall) {
		return // One failure of many that were under way; the pause is already running.
	}
	pause := in.fleet.opts.EjectMin << min(in.ejectCount, 20)
	if pause <= 0 || pause > in.fleet.opts.EjectMax {
		pause = in.fleet.opts.EjectMax
	}
	in.ejectCount++
	in.ejected, in.ejectKind, in.ejectUntil = true, kind, now.Add(pause)
	in.soft, in.probation = 0, false
	in.ejections[kind.index()].Add(1)
	in.logHealthLocked(now, "ejected: "+string(kind))
}

func (in *instance) failed(now time.Time, kind FailureKind) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if kind == FailureConnect {
		in.ejectLocked(now, kind)
		return
	}
	in.soft++
	if in.soft >= in.fleet.opts.SoftFailures || in.onTrialLocked(now) {
		in.ejectLocked(now, kind)
		return
	}
	select { // A lost connection may mean a dead process: look now, not at the next poll.
	case in.kick <- struct{}{}:
	default:
	}
}

func (in *instance) succeeded(now time.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.aliveAt = now
	in.soft = 0
	if in.onTrialLocked(now) {
		in.probation, in.ejected = false, false
		in.logHealthLocked(now, "a request succeeded")
	}
	if !in.ejected {
		in.ejectCount = 0
	}
}

// scraped takes in one reading of the metrics.
func (in *instance) scraped(now time.Time, s sample, missing []string) {
	in.mu.Lock()
	var gone ID
	restarted := false
	start := int64(math.Round(s.start * 1e6))
	if math.IsNaN(s.start) {
		start = in.start
		// An engine that hides its start still shows a restart: its counters begin anew. The other gateways see that at
		// another moment, so what they record is not shared until it shows its start.
		if !in.scrapedAt.IsZero() && (s.prompt < in.load.prompt || s.generated < in.load.generated) {
			start = now.UnixMicro()
		}
	}
	if start != in.start {
		gone, restarted = ID{in.addr, in.start}, true
		if !in.scrapedAt.IsZero() {
			in.restarts.Add(1)
			in.fleet.log.Info("replica restarted", "replica", in.addr, "start", start)
		}
		in.start = start
		in.fill = FillRate{}
		in.outdated = true
		in.movedAt = time.Time{}
	}
	in.load = s
	in.scrapedAt, in.aliveAt = now, now
	cached := s.cached
	if math.IsNaN(cached) {
		cached = 0
	}
	if s.blockTokens > 0 {
		in.fill.Observe(now, FilledBlocks(s.prompt, cached, s.generated, s.blockTokens), float64(s.numBlocks))
	}
	if len(missing) > 0 && !in.warned {
		in.warned = true
		in.fleet.log.Warn("replica does not export all metrics", "replica", in.addr, "missing", missing)
	}
	if !in.fresh {
		in.fresh = true
		in.fleet.log.Info("replica metrics are fresh", "replica", in.addr)
	}
	in.watchProgressLocked(now, s)
	in.mu.Unlock()
	if restarted {
		in.fleet.tellGone(gone)
	}
}

// watchProgressLocked finds engines that say they run requests and compute nothing.
func (in *instance) watchProgressLocked(now time.Time, s sample) {
	if in.fleet.opts.StallAfter < 0 {
		return
	}
	sum, known := 0.0, false
	for _, c := range [...]float64{s.prompt, s.generated, s.steps} {
		if !math.IsNaN(c) {
			sum += c
			known = true
		}
	}
	if !known {
		return
	}
	if in.movedAt.IsZero() || sum != in.progress || !(s.running > 0) {
		moved := !in.movedAt.IsZero() && sum != in.progress
		in.progress, in.movedAt = sum, now
		if in.ejected && in.ejectKind == failureStall {
			in.ejected = false
			in.probation = !moved // Idle, not proven to work: let it show.
			in.logHealthLocked(now, "no longer stalled")
		}
		return
	}
	limit := in.fleet.opts.StallAfter
	if math.IsNaN(s.steps) {
		limit *= 5
	}
	if now.Sub(in.movedAt) >= limit {
		in.ejectLocked(now, failureStall)
	}
}

// scrapeFailed takes in a reading of the metrics that failed.
func (in *instance) scrapeFailed(now time.Time, why string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.fresh && now.Sub(in.scrapedAt) > in.fleet.opts.StaleAfter {
		in.fresh = false
		in.fleet.log.Warn("replica metrics are stale", "replica", in.addr, "age_seconds", int(now.Sub(in.scrapedAt).Seconds()), "why", why)
	}
}

// snapshot fills s; it takes the instance's lock and nothing else.
func (in *instance) snapshot(now time.Time, s *Snapshot) {
	in.mu.Lock()
	defer in.mu.Unlock()
	*s = Snapshot{
		ID: ID{in.addr, in.start}, Healthy: in.usableLocked(now), Up: in.up, Draining: in.draining, Models: in.models,
		BlockTokens: in.load.blockTokens, NumBlocks: in.load.numBlocks,
		KVUsage:        in.load.kvUsage,
		FillRate:       in.fill.PerSecond(),
		InFlight:       int(in.inFlight.Load()),
		PrefillTokens:  in.prefillTokens,
		Prefills:       in.prompts,
		PrefillBegan:   in.began,
		PrefillRate:    in.rate.get(),
		LoadedAdapters: in.load.adapters, WaitingAdapters: in.load.waitingAdapters, MaxAdapters: in.load.maxAdapters,
		Weight: in.weight,
	}
	if !in.scrapedAt.IsZero() {
		s.MetricsAge = now.Sub(in.scrapedAt)
		s.MetricsFresh = s.MetricsAge <= in.fleet.opts.StaleAfter && in.load.running >= 0 && in.load.waiting >= 0
	}
	if in.load.running > 0 {
		s.Running = int(in.load.running)
	}
	if in.load.waiting > 0 {
		s.Waiting = int(in.load.waiting)
	}
}

// Lease is a request's place on a replica, from its dispatch to its end. Its methods are safe for concurrent use.
type Lease struct {
	in     *instance
	tokens int64
	trial  bool

	prefilling atomic.Bool
	released   atomic.Bool
}

func (in *instance) acquire(now time.Time, prefillTokens int) *Lease {
	l := &Lease{in: in, tokens: int64(max(prefillTokens, 0))}
	l.prefilling.Store(true)
	in.inFlight.Add(1)
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.prompts == 0 {
		in.began = now
	}
	in.prefillTokens += l.tokens
	in.prompts++
	if in.onTrialLocked(now) {
		l.trial = true
		in.trials++
	}
	return l
}

// FirstToken says that the first token came, ttft after the request was sent. The request's prefill tokens no longer
// count, and the replica's prefill rate learns from it, unless ttft is 0: then the time, or the number of tokens, is not
// known well enough. Calls after the first, or after Release, do nothing.
func (l *Lease) FirstToken(ttft time.Duration) {
	if !l.prefilled() {
		return
	}
	now := time.Now()
	l.in.rate.observe(now, int(l.tokens), ttft)
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	l.in.aliveAt = now
	l.in.began = now // With the next: engines work in the order of arrival.
}

// prefilled stops counting the lease's prefill tokens; it reports whether this call did.
func (l *Lease) prefilled() bool {
	if !l.prefilling.CompareAndSwap(true, false) {
		return false
	}
	l.in.mu.Lock()
	defer l.in.mu.Unlock()
	l.in.prefillTokens -= l.tokens
	l.in.prompts--
	return true
}

// Failed reports how the request failed on its replica. It does not release the lease.
func (l *Lease) Failed(kind FailureKind) { l.in.failed(time.Now(), kind) }

// Succeeded reports that the replica answered, whatever the status. It does not release the lease.
func (l *Lease) Succeeded() { l.in.succeeded(time.Now()) }

// Release gives the place back. Calls after the first do nothing.
func (l *Lease) Release() {
	if !l.released.CompareAndSwap(false, true) {
		return
	}
	l.prefilled()
	l.in.inFlight.Add(-1)
	if l.trial {
		l.in.mu.Lock()
		l.in.trials--
		l.in.mu.Unlock()
	}
}
