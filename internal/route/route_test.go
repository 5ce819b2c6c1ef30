package route

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

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

func newPolicy(t testing.TB, opts Options) *Selector {
	t.Helper()
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// noProbes are options for tests that state which candidate is picked.
func noProbes(name string) Options { return Options{Policy: name, ProbeEvery: -1} }

// randomCandidates is a fleet in any state that the gateway can see, and some that it should not.
func randomCandidates(rng *rand.Rand, n, prompt int) []Candidate {
	cs := fleet(n)
	for i := range cs {
		c := &cs[i]
		c.MatchedTokens = rng.IntN(3) * rng.IntN(prompt+100) / 2
		c.QueuedTokens = int64(rng.IntN(2) * rng.IntN(50_000))
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
		SimHash:      rng.Uint64(),
		Session:      rng.Uint64N(2) * rng.Uint64(),
		Adapter:      rng.IntN(2) == 0,
	}
}

func TestPickHasTheBestCostUnderRandomLoads(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, name := range []string{LeastTTFT, Session, PrefixHash, SimHash, Weighted, LongestPrefix, LeastLoad} {
		p := newPolicy(t, noProbes(name))
		for range 20_000 {
			req := randomRequest(rng)
			cs := randomCandidates(rng, 1+rng.IntN(12), req.PromptTokens)
			d, ok := p.Pick(req, cs)
			costs := p.AppendCosts(nil, req, cs)
			best := math.Inf(1)
			for _, c := range costs {
				best = min(best, c)
			}
			if !ok {
				if best != math.Inf(1) {
					t.Fatalf("%s: no pick, want one of cost %v", name, best)
				}
				continue
			}
			if got := costs[d.Index]; got != best {
				t.Fatalf("%s: Pick costs %v, want %v; costs %v", name, got, best, costs)
			}
		}
	}
}

func TestPickAllocatesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	req := &Request{PromptTokens: 5000, Prefix: 1, TextPrefix: 2, SimHash: 3, Session: 4, Adapter: true}
	cs := randomCandidates(rng, 128, 5000)
	for _, name := range Names() {
		p := newPolicy(t, Options{Policy: name, ProbeEvery: 3})
		if n := testing.AllocsPerRun(200, func() { p.Pick(req, cs) }); n != 0 {
			t.Errorf("%s: Pick allocates %v times, want 0", name, n)
		}
	}
}
