package route

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"prefixgate/internal/replica"
)

// fleet returns n healthy idle candidates with fresh metrics.
func fleet(n int) []Candidate {
	cs := make([]Candidate, n)
	for i := range cs {
		cs[i] = Candidate{
			ID:           replica.ID{Addr: fmt.Sprintf("http://10.0.%d.%d:8000", i/250, i%250), Start: 1},
			Healthy:      true,
			MetricsFresh: true,
			PrefillRate:  8000,
		}
	}
	return cs
}

func newPolicy(tb testing.TB, opts Options) *Selector {
	tb.Helper()
	p, err := New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// noProbes are options for tests that state which candidate is picked.
func noProbes(name string) Options { return Options{Policy: name, ProbeEvery: -1} }

// pick is for cases where some candidate can be picked.
func pick(tb testing.TB, p Policy, req *Request, cs []Candidate) Decision {
	tb.Helper()
	d, ok := p.Pick(req, cs)
	if !ok {
		tb.Fatalf("%s: no pick", p.Name())
	}
	return d
}

// randomCandidates is a fleet in any state that the gateway can see, and some that it should not.
func randomCandidates(rng *rand.Rand, n, prompt int) []Candidate {
	cs := fleet(n)
	for i := range cs {
		c := &cs[i]
		c.MatchedTokens = rng.IntN(3) * rng.IntN(prompt+100) / 2
		c.QueuedTokens = int64(rng.IntN(2) * rng.IntN(50_000))
		c.QueuedPrompts = rng.IntN(4)
		c.QueueAge = time.Duration(rng.IntN(3)) * time.Second
		c.InFlight = rng.IntN(40)
		c.Running, c.Waiting = rng.IntN(40), rng.IntN(2)*rng.IntN(300)
		c.KVUsage = [...]float64{math.NaN(), 0, rng.Float64(), 1, 7}[rng.IntN(5)]
		c.PrefillRate = [...]float64{0, 8000, 8100, 20_000 * rng.Float64(), math.NaN(), math.Inf(1), -4}[rng.IntN(7)]
		c.MetricsFresh = rng.IntN(4) > 0
		c.Healthy = rng.IntN(8) > 0
		c.Draining = rng.IntN(8) == 0
		c.Adapter = AdapterState(rng.IntN(4))
		c.Weight = [...]float64{0, 1, 2, 0.5, math.NaN()}[rng.IntN(5)]
	}
	return cs
}

func randomRequest(rng *rand.Rand) *Request {
	return &Request{
		PromptTokens: rng.IntN(2) * rng.IntN(30_000),
		Prefix:       rng.Uint64N(2) * rng.Uint64(),
		TextPrefix:   rng.Uint64N(2) * rng.Uint64(),
		SimHash:      rng.Uint64N(2) * rng.Uint64(),
		Session:      rng.Uint64N(2) * rng.Uint64(),
		Adapter:      rng.IntN(2) == 0,
	}
}

func TestPickHasTheBestCostUnderRandomLoads(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, name := range []string{LeastTTFT, Session, PrefixHash, SimHash, Weighted, LongestPrefix, LeastLoad} {
		exact := newPolicy(t, Options{Policy: name, ProbeEvery: -1, LeastTTFT: LeastTTFTOptions{Sample: -1}})
		usual := newPolicy(t, noProbes(name))
		for i := range 5000 {
			req := randomRequest(rng)
			// In a larger fleet the usual one compares only a sample of equals.
			p, cs := usual, randomCandidates(rng, 1+rng.IntN(8), req.PromptTokens)
			if i%2 == 0 {
				p, cs = exact, randomCandidates(rng, 1+rng.IntN(40), req.PromptTokens)
			}
			d, ok := p.Pick(req, cs)
			costs := p.AppendCosts(nil, req, cs)
			best := slices.Min(costs)
			if !ok {
				if best != math.Inf(1) {
					t.Fatalf("%s: no pick, want one of cost %v", name, best)
				}
				continue
			}
			if math.IsNaN(best) || math.IsInf(best, 0) {
				t.Fatalf("%s: best cost is %v; costs %v", name, best, costs)
			}
			if got, limit := costs[d.Index], best+p.Margin(req, cs); got > limit {
				t.Fatalf("%s: Pick costs %v, want at most %v; costs %v", name, got, limit, costs)
			}
			if c := cs[d.Index]; !c.Healthy || c.Draining {
				t.Fatalf("%s: picked %+v", name, c)
			}
		}
	}
}

// In a large fleet only a sample of those that hold equally much is compared, but nothing that holds something else may be better than the
// pick, the pick must be among the better half of its equals nearly always, and gateways must not all pick the same one.
func TestSampleOfEquals(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	worse, total := 0, 0
	for range 100 {
		cs := fleet(200)
		for i := range cs {
			cs[i].InFlight = rng.IntN(4)
			cs[i].QueuedTokens = rng.Int64N(3000)
			if i%3 == 0 {
				cs[i].MatchedTokens = 2048
			}
			if i == 7 {
				cs[i].MatchedTokens = 2048 + 16*rng.IntN(100)
			}
		}
		req := &Request{PromptTokens: 4000, Prefix: rng.Uint64()}
		chosen := make(map[int]bool)
		for gateway := range uint64(20) {
			p := newPolicy(t, Options{Seed: gateway * 77, ProbeEvery: -1})
			costs := p.AppendCosts(nil, req, cs)
			got := pick(t, p, req, cs).Index
			chosen[got] = true
			better, equals := 0, 0
			for i := range cs {
				if cs[i].MatchedTokens != cs[got].MatchedTokens {
					if costs[i] < costs[got] && cs[i].MatchedTokens != 2048 {
						t.Fatalf("picked %d of cost %v, but %d holds something else and costs %v", got, costs[got], i, costs[i])
					}
					continue
				}
				equals++
				if costs[i] < costs[got] {
					better++
				}
			}
			total++
			if better > equals/2 {
				worse++
			}
		}
		if len(chosen) < 3 && !chosen[7] {
			t.Fatalf("20 gateways pick only %v", chosen)
		}
	}
	if worse*50 > total {
		t.Errorf("%d of %d picks are among the worse half of their equals, want at most 2 %%", worse, total)
	}
}

// Without load costs must be equal to the last bit to count as equal.
func TestNoMarginWithoutLoad(t *testing.T) {
	p := newPolicy(t, noProbes(LeastTTFT))
	cs := fleet(8)
	for i := range cs {
		cs[i].InFlight = 3
	}
	if m := p.Margin(&Request{PromptTokens: 1000}, cs); m != 0 {
		t.Errorf("Margin = %v, want 0", m)
	}
}

func TestPickNeedsSomeUsableCandidate(t *testing.T) {
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 1})
		down := fleet(3)
		for i := range down {
			down[i].Healthy = i == 0
			down[i].Draining = i == 0
		}
		for _, cs := range [][]Candidate{nil, {}, down} {
			if d, ok := p.Pick(&Request{PromptTokens: 10, Session: 1, TextPrefix: 1, SimHash: 1}, cs); ok {
				t.Errorf("%s: Pick(%d unusable candidates) = %+v, want none", name, len(cs), d)
			}
		}
		down[2].Healthy = true
		if d, ok := p.Pick(&Request{PromptTokens: 10}, down); !ok || d.Index != 2 || d.Reason != ReasonOnly {
			t.Errorf("%s: Pick = %+v, %v, want the only usable one", name, d, ok)
		}
	}
}

// Two gateways with different random numbers and a different past must agree where a prompt that nobody holds goes, and different
// prompts must go to different replicas.
func TestGatewaysAgreeOnAColdReplica(t *testing.T) {
	for _, name := range []string{LeastTTFT, Weighted, Session, PrefixHash, SimHash} {
		a := newPolicy(t, Options{Policy: name, Seed: 1, ProbeEvery: -1})
		b := newPolicy(t, Options{Policy: name, Seed: 99, ProbeEvery: -1})
		cs := fleet(16)
		for i := range cs {
			cs[i].PrefillRate = 7600 + float64(i)*50 // Each gateway learns a slightly different rate.
		}
		other := slices.Clone(cs)
		for i := range other {
			other[i].PrefillRate = 8400 - float64(i)*50
			other[i].ID.Start = 0 // One gateway does not know yet when it started.
		}
		slices.Reverse(other)
		used := make(map[string]int)
		for key := range uint64(2000) {
			h := mix(key)
			req := &Request{PromptTokens: 4000, Prefix: h, TextPrefix: h, SimHash: h, Session: h}
			da := pick(t, a, req, cs)
			pick(t, b, &Request{PromptTokens: 1}, other)
			db := pick(t, b, req, other)
			if cs[da.Index].ID.Addr != other[db.Index].ID.Addr {
				t.Fatalf("%s: gateways pick %v and %v for the same cold prompt", name, cs[da.Index].ID, other[db.Index].ID)
			}
			used[cs[da.Index].ID.Addr]++
		}
		if len(used) != len(cs) {
			t.Errorf("%s: cold prompts go to %d of %d replicas", name, len(used), len(cs))
		}
	}
}

// Keys stay where they are when another replica comes or goes.
func TestKeysStayWhenTheFleetChanges(t *testing.T) {
	for _, name := range []string{Session, PrefixHash} {
		p := newPolicy(t, noProbes(name))
		before, after := fleet(10), fleet(11)
		moved := 0
		for key := range uint64(3000) {
			h := mix(key + 1)
			req := &Request{PromptTokens: 100, Session: h, TextPrefix: h}
			was, is := pick(t, p, req, before).Index, pick(t, p, req, after).Index
			if was != is {
				moved++
				if is != 10 {
					t.Fatalf("%s: a key moved from %d to %d, though only 10 is new", name, was, is)
				}
			}
		}
		if moved < 3000/11/2 || moved > 3000/11*2 {
			t.Errorf("%s: %d of 3000 keys moved to the 11th replica, want about %d", name, moved, 3000/11)
		}
		gone := fleet(10)
		gone[3].Healthy = false
		for key := range uint64(1000) {
			req := &Request{PromptTokens: 100, Session: mix(key + 1), TextPrefix: mix(key + 1)}
			if was, is := pick(t, p, req, before).Index, pick(t, p, req, gone).Index; was != is && was != 3 {
				t.Fatalf("%s: a key moved from %d to %d when 3 failed", name, was, is)
			}
		}
	}
}

func TestSessionLeavesAnOverloadedReplicaAndComesBack(t *testing.T) {
	p := newPolicy(t, Options{Policy: Session})
	cs := fleet(4)
	req := &Request{PromptTokens: 100, Session: 42}
	home := pick(t, p, req, cs)
	if home.Reason != ReasonSession {
		t.Errorf("reason = %s, want session", home.Reason)
	}
	cs[home.Index].InFlight = 100
	away := pick(t, p, req, cs)
	if away.Index == home.Index || away.Reason != ReasonSpread {
		t.Errorf("Pick with an overloaded home = %+v, want another replica to spread to", away)
	}
	if again := pick(t, p, req, cs); again.Index != away.Index {
		t.Errorf("the second choice changed from %d to %d", away.Index, again.Index)
	}
	cs[home.Index].InFlight = 10
	if back := pick(t, p, req, cs); back.Index != home.Index {
		t.Errorf("Pick = %d after the load went, want home %d", back.Index, home.Index)
	}
}

func TestLeastTTFTWeighsWhatAMatchSaves(t *testing.T) {
	p := newPolicy(t, noProbes(LeastTTFT))
	req := &Request{PromptTokens: 10_000, Prefix: 7}
	cs := fleet(3)
	cs[1].MatchedTokens = 8000
	step := func(want int, reason Reason, what string) {
		t.Helper()
		if d := pick(t, p, req, cs); d.Index != want || d.Reason != reason {
			t.Errorf("%s: Pick = %d (%s), want %d (%s)", what, d.Index, d.Reason, want, reason)
		}
	}
	step(1, ReasonPrefix, "the match decides")
	cs[1].QueuedTokens = 11_000
	step(1, ReasonPrefix, "a queue that costs less than the 12,000 weighted tokens saved")
	cs[1].QueuedTokens, cs[0].QueuedTokens = 13_000, 10
	step(2, ReasonSpread, "a queue that costs more")
	cs[1].QueuedPrompts, cs[1].QueueAge = 1, time.Second
	step(1, ReasonPrefix, "8,000 of the queued tokens are computed by now")
	cs[1].QueueAge = time.Hour
	cs[1].QueuedPrompts = 100
	step(2, ReasonSpread, "a replica that hangs does not work its queue off")
	// One or two blocks weigh what they save, no more.
	cs = fleet(3)
	cs[0].MatchedTokens, cs[0].QueuedTokens = 32, 100
	cs[2].QueuedTokens = 1
	step(1, ReasonSpread, "a short match against a short queue")
	// Impossible matches count as the whole prompt, and no more.
	cs[0].MatchedTokens, cs[0].QueuedTokens = 1<<40, 0
	step(0, ReasonPrefix, "an impossible match")
	if d := pick(t, p, req, cs); d.ExpectedTTFT != 0 {
		t.Errorf("expected TTFT = %v, want 0", d.ExpectedTTFT)
	}
	cs = fleet(2)
	cs[1].QueuedTokens = 1 << 40
	cs[0].QueuedTokens = 6000
	if d := pick(t, p, req, cs); d.ExpectedTTFT != 2*time.Second {
		t.Errorf("expected TTFT = %v, want (6000 + 10000) / 8000 s", d.ExpectedTTFT)
	}
}

// A replica whose figures are missing, stale or nonsense is neither shunned nor preferred for it.
func TestMissingMetricsAreNoBias(t *testing.T) {
	spoil := map[string]func(*Candidate){
		"stale":        func(c *Candidate) { c.MetricsFresh = false; c.Running, c.Waiting, c.KVUsage = 500, 500, 1 },
		"no KV usage":  func(c *Candidate) { c.KVUsage = math.NaN() },
		"no rate":      func(c *Candidate) { c.PrefillRate = 0 },
		"NaN rate":     func(c *Candidate) { c.PrefillRate = math.NaN() },
		"infinite":     func(c *Candidate) { c.PrefillRate = math.Inf(1) },
		"nothing":      func(c *Candidate) { c.MetricsFresh = false; c.PrefillRate = 0; c.KVUsage = math.NaN() },
		"negative":     func(c *Candidate) { c.PrefillRate, c.KVUsage, c.Waiting, c.Running = -1, -1, -5, -5 },
		"lucky sample": func(c *Candidate) { c.PrefillRate = 9300 },
		"bad sample":   func(c *Candidate) { c.PrefillRate = 6900 },
	}
	for what, f := range spoil {
		for _, name := range Names() {
			for _, all := range []bool{false, true} {
				p := newPolicy(t, noProbes(name))
				cs := fleet(4)
				for i := range cs {
					cs[i].KVUsage = 0.85
					cs[i].Running = 5
					if i == 2 || all {
						f(&cs[i])
					}
				}
				counts := make([]int, len(cs))
				const n = 800
				for key := range uint64(n) {
					h := mix(key + 3)
					// Each request is answered before the next one comes, with 5 others in flight all the time.
					for i := range cs {
						cs[i].InFlight = 5
					}
					req := &Request{PromptTokens: 1000, Prefix: h, TextPrefix: h, SimHash: h, Session: h}
					counts[pick(t, p, req, cs).Index]++
				}
				// simhash's points divide the hashes unevenly among few replicas by nature.
				least, most := n/4*3/5, n/4*7/5
				if name == SimHash {
					least, most = n/4/3, n/4*3
				}
				for i, c := range counts {
					if c < least || c > most {
						t.Errorf("%s, %s, all %v: replica %d gets %d of %d: %v", name, what, all, i, c, n, counts)
						break
					}
				}
			}
		}
	}
}

func TestFilters(t *testing.T) {
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 7, Saturation: SaturationOptions{MaxInFlight: 50}})
		allowed := func(what string, adapter bool, cs []Candidate, want ...int) Reason {
			t.Helper()
			var last Reason
			for key := range uint64(200) {
				h := mix(key + 1)
				d := pick(t, p, &Request{PromptTokens: 500, Prefix: h, TextPrefix: h, SimHash: h, Session: h, Adapter: adapter}, cs)
				if !slices.Contains(want, d.Index) {
					t.Fatalf("%s, %s: picked %d, want one of %v", name, what, d.Index, want)
				}
				last = d.Reason
			}
			return last
		}
		busy := func() []Candidate {
			cs := fleet(4)
			for i := range cs {
				cs[i].InFlight = 10 // So that none is probed.
			}
			return cs
		}
		cs := busy()
		cs[0].Healthy, cs[1].Draining = false, true
		allowed("health and draining", false, cs, 2, 3)

		cs = busy()
		cs[0].Waiting, cs[1].KVUsage, cs[1].Waiting, cs[2].InFlight = 300, 0.99, 1, 50
		allowed("saturation", false, cs, 3)
		cs[3].Waiting = 1000
		if r := allowed("all saturated", false, cs, 0, 1, 2, 3); r != ReasonSaturated {
			t.Errorf("%s: reason = %s, want saturated", name, r)
		}
		cs = busy()
		cs[0].Waiting, cs[0].MetricsFresh = 300, false
		cs[1].InFlight, cs[2].InFlight, cs[3].InFlight = 50, 50, 50
		allowed("stale metrics do not saturate", false, cs, 0)

		cs = busy()
		cs[0].Adapter, cs[1].Adapter, cs[2].Adapter, cs[3].Adapter = AdapterFull, AdapterLoaded, AdapterLoadable, AdapterFull
		switch name {
		case Weighted, LeastTTFT:
			allowed("adapter loaded", true, cs, 1)
		default:
			allowed("adapter loaded or loadable", true, cs, 1, 2)
		}
		cs[1].Healthy, cs[2].Healthy = false, false
		allowed("another adapter has to go", true, cs, 0, 3)
	}
}

func TestLongestPrefixGate(t *testing.T) {
	p := newPolicy(t, noProbes(LongestPrefix))
	req := &Request{PromptTokens: 1000, Prefix: 5}
	cs := fleet(3)
	cs[2].MatchedTokens = 600
	step := func(want int, reason Reason) {
		t.Helper()
		if d := pick(t, p, req, cs); d.Index != want || d.Reason != reason {
			t.Errorf("Pick = %d (%s), want %d (%s)", d.Index, d.Reason, want, reason)
		}
	}
	step(2, ReasonPrefix)
	cs[2].InFlight, cs[1].InFlight = 32, 1
	step(2, ReasonPrefix)
	cs[2].InFlight = 33
	step(0, ReasonSpread)
	for i := range cs {
		cs[i].InFlight += 400
	}
	step(2, ReasonPrefix) // 433 is not 1.1 times 400.
	cs[2].MatchedTokens = 500
	step(0, ReasonSpread) // Half of the prompt is not more than half.
}

func TestWeightedPrefersLoadedAdaptersAndShortQueues(t *testing.T) {
	p := newPolicy(t, noProbes(Weighted))
	req := &Request{PromptTokens: 1000, Prefix: 5, Adapter: true}
	cs := fleet(3)
	cs[0].Adapter, cs[0].Waiting, cs[0].InFlight = AdapterLoaded, 100, 100
	cs[1].Adapter, cs[1].MatchedTokens = AdapterLoadable, 990
	cs[2].Adapter = AdapterLoadable
	step := func(want int, reason Reason) {
		t.Helper()
		if d := pick(t, p, req, cs); d.Index != want || d.Reason != reason {
			t.Errorf("Pick = %d (%s), want %d (%s)", d.Index, d.Reason, want, reason)
		}
	}
	step(0, ReasonAdapter)
	cs[0].Waiting, cs[0].InFlight = 129, 129
	step(1, ReasonPrefix)
	cs[1].Waiting, cs[1].InFlight = 6, 6 // Over the queue threshold of 5.
	step(2, ReasonSpread)
	cs[1].Waiting, cs[1].InFlight = 0, 0
	cs[1].KVUsage = 0.81 // Over the threshold of 0.8.
	step(2, ReasonSpread)
}

func TestRotationFollowsWeights(t *testing.T) {
	for _, name := range []string{RoundRobin, Random, PowerOfTwo, LeastLoad, LeastTTFT, Session, PrefixHash} {
		p := newPolicy(t, noProbes(name))
		cs := fleet(4)
		for i := range cs {
			cs[i].Weight = []float64{1, 1, 2, 4}[i]
		}
		counts := make([]float64, 4)
		const n = 8000
		for key := range uint64(n) {
			h := mix(key + 9)
			i := pick(t, p, &Request{Prefix: h, TextPrefix: h, SimHash: h, Session: h}, cs).Index
			counts[i]++
		}
		want := []float64{1, 1, 2, 4}
		if name == PowerOfTwo { // Weighs loads, not draws, and nothing is loaded here.
			want = []float64{2, 2, 2, 2}
		}
		for i := range counts {
			if share := counts[i] / n * 8; share < want[i]*0.85 || share > want[i]*1.15 {
				t.Errorf("%s: shares %v of %d, want %v", name, counts, n, want)
				break
			}
		}
	}
}

// No policy may starve a healthy replica for ever: whatever speaks against it may have changed. The traffic is the worst there is:
// one prompt again and again, fully cached elsewhere, one request at a time.
func TestNoHealthyReplicaStarves(t *testing.T) {
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 64})
		cs := fleet(8)
		cs[0].MatchedTokens = 4000
		cs[5].PrefillRate = 3 // Learned on a bad day.
		other := fleet(5)     // Another model's replicas take every second decision.
		counts := make([]int, len(cs))
		for i := range 12_000 {
			req := &Request{PromptTokens: 4001, Prefix: 1, TextPrefix: 1, SimHash: 1}
			counts[pick(t, p, req, cs).Index]++
			if i%2 == 0 {
				pick(t, p, req, other)
			}
		}
		if slices.Min(counts) == 0 {
			t.Errorf("%s: decisions by replica %v, want some for each", name, counts)
		}
		// But a probe is the exception.
		if name == LeastTTFT && counts[0] < 11_700 {
			t.Errorf("%s: decisions by replica %v, want nearly all on the first", name, counts)
		}
	}
}

func TestSimHashKeepsSimilarPromptsTogether(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	p := newPolicy(t, noProbes(SimHash))
	cs := fleet(4)
	same := 0
	for range 300 {
		tokens := make([]uint32, 2000)
		for i := range tokens {
			tokens[i] = rng.Uint32N(100_000)
		}
		longer := append(slices.Clone(tokens), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
		a, b := SimHashOf(tokens, 4096), SimHashOf(longer, 4096)
		if pick(t, p, &Request{SimHash: a}, cs).Index == pick(t, p, &Request{SimHash: b}, cs).Index {
			same++
		}
	}
	if same < 240 {
		t.Errorf("%d of 300 prompts stay on their replica with 10 tokens more, want at least 240", same)
	}
}

func TestKeys(t *testing.T) {
	if HashSession("") != 0 || HashText("", 5) != 0 || HashText("abc", 0) != 0 || HashTokens(nil, 5) != 0 || SimHashOf(nil, 5) != 0 || HashTokens([]uint32{1}, -1) != 0 {
		t.Error("a key of nothing is not 0")
	}
	if HashSession("a") == HashSession("b") {
		t.Error("two sessions have one key")
	}
	if HashText("héllo world", 5) != HashText("héllo there", 5) || HashText("héllo", 5) != HashText("héllo", 50) || HashText("héllo", 5) == HashText("hélla", 5) {
		t.Error("HashText does not go by the first characters")
	}
	a, b := []uint32{1, 2, 3, 4}, []uint32{1, 2, 3, 5}
	if HashTokens(a, 3) != HashTokens(b, 3) || HashTokens(a, 4) == HashTokens(b, 4) || HashTokens(a, 4) != HashTokens(a, 400) {
		t.Error("HashTokens does not go by the first tokens")
	}
}

func TestPickAllocatesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	req := &Request{PromptTokens: 5000, Prefix: 1, TextPrefix: 2, SimHash: 3, Session: 4, Adapter: true}
	cs := randomCandidates(rng, 128, 5000)
	idle := fleet(128)
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 3})
		if n := testing.AllocsPerRun(200, func() { p.Pick(req, cs); p.Pick(req, idle) }); n != 0 {
			t.Errorf("%s: Pick allocates %v times, want 0", name, n)
		}
	}
}

// For the race detector.
func TestPickIsSafeForConcurrentUse(t *testing.T) {
	cs := fleet(8)
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 2})
		counts := make([]int, len(cs))
		var mu sync.Mutex
		var wg sync.WaitGroup
		for g := range uint64(8) {
			wg.Go(func() {
				local := make([]int, len(cs))
				for i := range uint64(500) {
					h := mix(g<<32 + i)
					d, _ := p.Pick(&Request{PromptTokens: 10, Prefix: h, TextPrefix: h, SimHash: h, Session: h}, cs)
					local[d.Index]++
				}
				mu.Lock()
				defer mu.Unlock()
				for i, n := range local {
					counts[i] += n
				}
			})
		}
		wg.Wait()
		if name == RoundRobin && slices.Max(counts)-slices.Min(counts) > 0 {
			t.Errorf("%s: %v, want the same for each", name, counts)
		}
	}
}

func TestOptionsAreValidated(t *testing.T) {
	for _, name := range append(Names(), "") {
		if err := (Options{Policy: name}).Validate(); err != nil {
			t.Errorf("Validate of the defaults of %q: %v", name, err)
		}
	}
	bad := map[string]Options{
		"policy":                     {Policy: "best"},
		"saturation.max_kv_usage":    {Saturation: SaturationOptions{MaxKVUsage: 1.5}},
		"least_ttft.prefill_rate":    {LeastTTFT: LeastTTFTOptions{PrefillRate: math.NaN()}},
		"session.max_load_factor":    {Session: SessionOptions{MaxLoadFactor: 0.5}},
		"prefix_hash.load_factor":    {PrefixHash: PrefixHashOptions{LoadFactor: 0.9}},
		"prefix_hash.tokens":         {PrefixHash: PrefixHashOptions{Tokens: -1}},
		"simhash.load_factor":        {SimHash: SimHashOptions{LoadFactor: 0.5}},
		"weighted.kv_weight":         {Weighted: WeightedOptions{KVWeight: math.Inf(1)}},
		"longest_prefix.min_match":   {LongestPrefix: LongestPrefixOptions{MinMatch: 2}},
		"longest_prefix.balance_rel": {LongestPrefix: LongestPrefixOptions{BalanceRel: 0.5}},
	}
	for key, opts := range bad {
		err := opts.Validate()
		if err == nil || len(err.Error()) < len(key) || err.Error()[:len(key)] != key {
			t.Errorf("Validate = %v, want an error that begins with %s", err, key)
		}
		if _, err := New(opts); err == nil {
			t.Errorf("New with a wrong %s works", key)
		}
	}
}
