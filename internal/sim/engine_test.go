package sim

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"prefixgate/internal/block"
)

// chainOf is the chain of n blocks of a prompt called name.
func chainOf(name uint64, n int) []block.Hash {
	chain := make([]block.Hash, n)
	for i := range chain {
		chain[i] = block.Hash(mix(name<<32 | uint64(i+1)))
	}
	return chain
}

// drain runs the engine until nothing is left to happen.
func drain(tb testing.TB, e *Engine) []Event {
	tb.Helper()
	var events []Event
	for range 10_000_000 {
		at, ok := e.Next()
		if !ok {
			return events
		}
		events = e.Advance(at, events)
	}
	tb.Fatal("the engine does not come to rest")
	return nil
}

func submit(tb testing.TB, e *Engine, now time.Duration, r Request) {
	tb.Helper()
	if err := e.Submit(now, r); err != nil {
		tb.Fatalf("Submit(%d): %v", r.ID, err)
	}
}

func first(events []Event, id uint64, kind Kind) (Event, bool) {
	i := slices.IndexFunc(events, func(ev Event) bool { return ev.ID == id && ev.Kind == kind })
	if i < 0 {
		return Event{}, false
	}
	return events[i], true
}

// The cases observed of vLLM 0.32 with blocks of 32: the last token is always computed.
func TestHitsEndBeforeTheLastToken(t *testing.T) {
	for _, c := range []struct{ tokens, cached int }{{32, 0}, {33, 32}, {64, 32}, {70, 64}, {5, 0}} {
		e := NewEngine(Options{BlockTokens: 32})
		chain := chainOf(1, c.tokens/32)
		for id := range uint64(2) {
			submit(t, e, 0, Request{ID: id, PromptTokens: c.tokens, OutputTokens: 1, Chain: chain})
		}
		ev, ok := first(drain(t, e), 1, FirstToken)
		if !ok || ev.CachedTokens != c.cached {
			t.Errorf("second prompt of %d tokens has %d cached, want %d", c.tokens, ev.CachedTokens, c.cached)
		}
	}
}

func TestOnlyUncachedTokensCostTimeAndOneAtATime(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 10, PrefillRate: 1000, DecodeRate: 100})
	chain := chainOf(1, 100)
	submit(t, e, 0, Request{ID: 1, PromptTokens: 1000, OutputTokens: 3, Chain: chain})
	submit(t, e, 0, Request{ID: 2, PromptTokens: 1005, OutputTokens: 1, Chain: chain})
	submit(t, e, 500*time.Millisecond, Request{ID: 3, PromptTokens: 200, OutputTokens: 1, Chain: chainOf(2, 20)})
	events := drain(t, e)
	for _, c := range []struct {
		id     uint64
		kind   Kind
		at     time.Duration
		cached int
	}{
		{1, FirstToken, time.Second, 0},
		{1, Done, 1020 * time.Millisecond, 0},
		{2, FirstToken, 1005 * time.Millisecond, 1000},
		{3, FirstToken, 1205 * time.Millisecond, 0},
	} {
		ev, ok := first(events, c.id, c.kind)
		if !ok || ev.At != c.at || ev.CachedTokens != c.cached {
			t.Errorf("request %d, kind %d: %+v, want at %v with %d cached", c.id, c.kind, ev, c.at, c.cached)
		}
	}
	if !slices.IsSortedFunc(events, func(a, b Event) int { return int(a.At - b.At) }) {
		t.Errorf("events out of order: %+v", events)
	}
}

// Generated tokens are cached too, all but the last: floor((prompt + generated - 1) / B) blocks.
func TestAnswersAreCached(t *testing.T) {
	for _, c := range []struct{ prompt, output, blocks int }{
		{32, 1, 1}, {31, 1, 0}, {31, 2, 1}, {40, 24, 1}, {40, 25, 2}, {32, 33, 2}, {64, 32, 2}, {64, 33, 3}, {1, 1, 0},
	} {
		for _, each := range []bool{false, true} {
			e := NewEngine(Options{BlockTokens: 32})
			chain := chainOf(1, (c.prompt+c.output)/32)
			submit(t, e, 0, Request{ID: 1, PromptTokens: c.prompt, OutputTokens: c.output, Chain: chain, EachToken: each})
			drain(t, e)
			if got := e.cache.Match(chain); got != c.blocks {
				t.Errorf("%d + %d tokens (each token: %v) leave %d blocks, want %d", c.prompt, c.output, each, got, c.blocks)
			}
			if got := e.Stats().StoredBlocks; got != c.blocks {
				t.Errorf("%d + %d tokens store %d hashes, want %d", c.prompt, c.output, got, c.blocks)
			}
		}
	}
}

func TestTheNextTurnHitsTheAnswer(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 16})
	chain := chainOf(1, 20)
	submit(t, e, 0, Request{ID: 1, PromptTokens: 100, OutputTokens: 61, Chain: chain[:10]})
	drain(t, e)
	if got := e.Match(chain, 300); got != 160 {
		t.Errorf("Match = %d tokens after 100 of prompt and 61 of answer, want 160", got)
	}
}

func TestUnknownAnswersTakeBlocksButAreNeverHit(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 16})
	submit(t, e, 0, Request{ID: 1, PromptTokens: 32, OutputTokens: 33, Chain: chainOf(1, 2)})
	drain(t, e)
	if got := e.Stats().StoredBlocks; got != 4 {
		t.Errorf("StoredBlocks = %d, want 2 of the prompt and 2 of the answer", got)
	}
	if got := e.Match(chainOf(1, 4), 100); got != 32 {
		t.Errorf("Match = %d, want the prompt's 32", got)
	}
}

func TestEachTokenHasItsTime(t *testing.T) {
	e := NewEngine(Options{PrefillRate: math.Inf(1), DecodeRate: 30})
	submit(t, e, time.Second, Request{ID: 4, PromptTokens: 20, OutputTokens: 5, EachToken: true})
	events := drain(t, e)
	if len(events) != 6 || events[5].Kind != Done {
		t.Fatalf("events = %+v, want five tokens and the end", events)
	}
	for i, ev := range events[:5] {
		want := time.Second + time.Duration(float64(i)/30*1e9)
		if ev.Tokens != i+1 || ev.At != want {
			t.Errorf("token %d: %+v, want at %v", i+1, ev, want)
		}
	}
}

func TestMaxRunningMakesRequestsWait(t *testing.T) {
	e := NewEngine(Options{MaxRunning: 2, PrefillRate: math.Inf(1), DecodeRate: 10})
	for id := range uint64(3) {
		submit(t, e, 0, Request{ID: id, PromptTokens: 10, OutputTokens: 11})
	}
	e.Advance(time.Millisecond, nil)
	if s := e.Stats(); s.Running != 2 || s.Waiting != 1 || s.WaitingTokens != 10 {
		t.Errorf("Stats = %+v, want 2 running and 1 waiting", s)
	}
	ev, _ := first(drain(t, e), 2, FirstToken)
	if ev.At != time.Second {
		t.Errorf("third request starts at %v, want when the first two end", ev.At)
	}
}

func TestAdmissionWaitsForBlocks(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 10, NumBlocks: 11, PrefillRate: math.Inf(1), DecodeRate: 10})
	submit(t, e, 0, Request{ID: 1, PromptTokens: 55, OutputTokens: 2})
	submit(t, e, 0, Request{ID: 2, PromptTokens: 50, OutputTokens: 1})
	submit(t, e, 0, Request{ID: 3, PromptTokens: 5, OutputTokens: 1})
	ev := drain(t, e)
	// First come, first served: the small one does not overtake.
	for _, id := range []uint64{2, 3} {
		if f, _ := first(ev, id, FirstToken); f.At != 100*time.Millisecond {
			t.Errorf("request %d starts at %v, want 100ms, when the first ends", id, f.At)
		}
	}
	if err := e.Submit(time.Second, Request{ID: 4, PromptTokens: 95, OutputTokens: 7}); !errors.Is(err, ErrNeverFits) {
		t.Errorf("Submit of 11 blocks into 10 = %v, want ErrNeverFits", err)
	}
	if err := e.Submit(time.Second, Request{ID: 4, PromptTokens: 95, OutputTokens: 6}); err != nil {
		t.Errorf("Submit of exactly 10 blocks = %v", err)
	}
}

func TestSubmitRefusesNonsense(t *testing.T) {
	e := NewEngine(Options{})
	for _, r := range []Request{{ID: 1, OutputTokens: 1}, {ID: 1, PromptTokens: 1}} {
		if e.Submit(0, r) == nil {
			t.Errorf("Submit(%+v) succeeded", r)
		}
	}
	submit(t, e, 0, Request{ID: 1, PromptTokens: 1, OutputTokens: 1})
	if e.Submit(0, Request{ID: 1, PromptTokens: 1, OutputTokens: 1}) == nil {
		t.Error("Submit of a doubled ID succeeded")
	}
}

// A client that leaves frees everything at once, and what was computed by then stays cached.
func TestAbort(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 10, PrefillRate: 1000, DecodeRate: 10})
	long, short := chainOf(1, 100), chainOf(2, 30)
	submit(t, e, 0, Request{ID: 1, PromptTokens: 1000, OutputTokens: 10, Chain: long})
	submit(t, e, 0, Request{ID: 2, PromptTokens: 200, OutputTokens: 101, Chain: short})
	submit(t, e, 0, Request{ID: 3, PromptTokens: 200, OutputTokens: 5, Chain: chainOf(3, 20)})
	if !e.Abort(205*time.Millisecond, 1) { // in its prefill
		t.Fatal("Abort of a running prefill = false")
	}
	if got := e.cache.Match(long); got != 20 {
		t.Errorf("205 ms of prefill leave %d blocks, want 20", got)
	}
	if !e.Abort(210*time.Millisecond, 3) { // waiting
		t.Fatal("Abort of a waiting request = false")
	}
	events := e.Advance(405*time.Millisecond, nil)
	if _, ok := first(events, 2, FirstToken); !ok {
		t.Fatalf("events = %+v, want request 2 to take over at once", events)
	}
	if !e.Abort(405*time.Millisecond+3550*time.Millisecond, 2) { // after 36 tokens
		t.Fatal("Abort of a decoding request = false")
	}
	if got := e.cache.Match(short); got != 23 {
		t.Errorf("36 tokens of answer after 200 leave %d blocks, want 23", got)
	}
	if e.Abort(5*time.Second, 2) {
		t.Error("Abort of an ended request = true")
	}
	if _, ok := e.Next(); ok {
		t.Error("Next() = true in an empty engine")
	}
	if s := e.Stats(); s.UsedBlocks != 0 || s.Running != 0 || s.Waiting != 0 || s.WaitingTokens != 0 || s.Aborted != 3 || s.GeneratedTokens != 36 {
		t.Errorf("Stats = %+v, want an empty engine, 3 aborted, 36 generated", s)
	}
}

func TestPreemptionTakesTheYoungest(t *testing.T) {
	e := NewEngine(Options{BlockTokens: 10, NumBlocks: 11, PrefillRate: 1000, DecodeRate: 100})
	submit(t, e, 0, Request{ID: 1, PromptTokens: 40, OutputTokens: 50, Chain: chainOf(1, 9)})
	submit(t, e, 0, Request{ID: 2, PromptTokens: 40, OutputTokens: 50, Chain: chainOf(2, 9)})
	events := drain(t, e)
	s := e.Stats()
	if s.Preemptions == 0 {
		t.Fatalf("Stats = %+v, want a preemption: two requests of 9 blocks share 10", s)
	}
	one, _ := first(events, 1, Done)
	two, _ := first(events, 2, Done)
	if one.At != 40*time.Millisecond+490*time.Millisecond {
		t.Errorf("the older request ends at %v, want undisturbed at 530ms", one.At)
	}
	if two.At <= one.At || two.Tokens != 50 || two.CachedTokens != 0 {
		t.Errorf("the younger request ends with %+v, want after the older and with all its tokens", two)
	}
	if s.PromptTokens != 80 || s.GeneratedTokens != 100 || s.QueriedTokens != 80 {
		t.Errorf("Stats = %+v, want each token counted once", s)
	}
}

// Whatever comes and goes: every request that is not aborted gets its events in order, at the end nothing is in use, and the same
// calls give the same events.
func TestRandomLoads(t *testing.T) {
	run := func(seed uint64) ([]Event, Stats) {
		rng := rand.New(rand.NewPCG(seed, 2))
		e := NewEngine(Options{
			BlockTokens: 1 + rng.IntN(20), NumBlocks: 30 + rng.IntN(50), MaxRunning: 1 + rng.IntN(12),
			PrefillRate: 500, DecodeRate: []float64{20, 200, math.Inf(1)}[rng.IntN(3)],
		})
		b := e.Options().BlockTokens
		var events []Event
		now := time.Duration(0)
		wanted := map[uint64]Request{}
		for id := range uint64(150) {
			now += time.Duration(rng.IntN(200)) * time.Millisecond
			prompt, output := 1+rng.IntN(10*b), 1+rng.IntN(6*b)
			r := Request{
				ID: id, PromptTokens: prompt, OutputTokens: output, EachToken: rng.IntN(2) == 0, NoRead: rng.IntN(10) == 0,
				Chain: randomChain(rng, prompt/b+rng.IntN(2)*((prompt+output)/b-prompt/b)),
			}
			submit(t, e, now, r)
			wanted[id] = r
			if rng.IntN(5) == 0 {
				victim := uint64(rng.IntN(int(id + 1)))
				if e.Abort(now, victim) {
					delete(wanted, victim)
				}
			}
			if rng.IntN(3) == 0 {
				events = e.Advance(now, events)
			}
			if s := e.Stats(); s.Running > e.Options().MaxRunning || s.UsedBlocks > s.UsableBlocks || (s.Running == 0 && s.Waiting > 0) {
				t.Fatalf("seed %d: Stats = %+v", seed, s)
			}
		}
		events = append(events, drain(t, e)...)
		for id, r := range wanted {
			var mine []Event
			for _, ev := range events {
				if ev.ID == id {
					mine = append(mine, ev)
				}
			}
			want := 2
			if r.EachToken {
				want = r.OutputTokens + 1
			}
			if len(mine) != want || mine[0].Kind != FirstToken || mine[len(mine)-1].Kind != Done || mine[len(mine)-1].Tokens != r.OutputTokens {
				t.Fatalf("seed %d: request %+v has events %+v", seed, r, mine)
			}
			if c := mine[0].CachedTokens; c%b != 0 || c > block.Hittable(r.PromptTokens, b)*b || (r.NoRead && c != 0) {
				t.Fatalf("seed %d: request %+v has %d cached tokens", seed, r, c)
			}
		}
		s := e.Stats()
		if s.UsedBlocks != 0 || s.WaitingTokens != 0 || s.Submitted != s.Finished+s.Aborted {
			t.Fatalf("seed %d: at rest Stats = %+v", seed, s)
		}
		return events, s
	}
	preemptions := int64(0)
	for seed := range uint64(150) {
		a, sa := run(seed)
		b, sb := run(seed)
		if !slices.Equal(a, b) || sa != sb {
			t.Fatalf("seed %d: two runs differ", seed)
		}
		preemptions += sa.Preemptions
	}
	if preemptions == 0 {
		t.Error("no load came to a preemption: the test does not reach what it is for")
	}
}

func TestOptionsValidate(t *testing.T) {
	if err := (Options{}).Validate(); err != nil {
		t.Errorf("Validate() of the zero value = %v", err)
	}
	if err := (Options{BlockTokens: -1, NumBlocks: 1, PrefillRate: math.NaN(), DecodeRate: -3, MaxRunning: -1}).Validate(); err == nil {
		t.Error("Validate() of nonsense = nil")
	} else if joined, ok := err.(interface{ Unwrap() []error }); !ok || len(joined.Unwrap()) != 5 {
		t.Errorf("Validate() = %v, want all five problems", err)
	}
}

func BenchmarkEngine(b *testing.B) {
	// The shape of a public conversation trace: 24 blocks of 512 tokens a prompt, a third of them shared.
	e := NewEngine(Options{BlockTokens: 512, NumBlocks: 2000})
	chains := make([][]block.Hash, 512)
	for i := range chains {
		chains[i] = append(chainOf(uint64(i/8), 8), chainOf(uint64(1000+i), 16)...)
	}
	var events []Event
	now := time.Duration(0)
	id := uint64(0)
	b.ReportAllocs()
	for b.Loop() {
		id++
		now += 2 * time.Second
		if err := e.Submit(now, Request{ID: id, PromptTokens: 12_300, OutputTokens: 340, Chain: chains[id*37%512]}); err != nil {
			b.Fatal(err)
		}
		events = e.Advance(now, events[:0])
	}
}
