package replica

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// engineTime plays an engine that prefills in the order of arrival at rate tokens per second plus a fixed cost.
type engineTime struct {
	rate  float64
	fixed time.Duration
	free  time.Time
}

func (e *engineTime) firstToken(sent time.Time, tokens int) time.Time {
	begin := sent
	if e.free.After(begin) {
		begin = e.free
	}
	e.free = begin.Add(e.fixed + time.Duration(float64(tokens)/e.rate*1e9))
	return e.free
}

func TestRateConverges(t *testing.T) {
	for _, c := range []struct {
		name     string
		rate     float64
		fixed    time.Duration
		gap      time.Duration // Mean time between requests.
		tokens   func(*rand.Rand) int
		outliers float64
		tol      float64
	}{
		{"idle", 10000, 20 * time.Millisecond, 5 * time.Second, func(r *rand.Rand) int { return 100 + r.IntN(8000) }, 0, 0.02},
		{"queued", 10000, 20 * time.Millisecond, 100 * time.Millisecond, func(r *rand.Rand) int { return 100 + r.IntN(8000) }, 0, 0.02},
		{"mostly cached", 8000, 30 * time.Millisecond, time.Second, func(r *rand.Rand) int { return 16 + r.IntN(400) }, 0, 0.1},
		{"outliers", 10000, 20 * time.Millisecond, 5 * time.Second, func(r *rand.Rand) int { return 100 + r.IntN(8000) }, 0.15, 0.3},
		{"slow", 300, time.Millisecond, 5 * time.Second, func(r *rand.Rand) int { return 100 + r.IntN(3000) }, 0, 0.02},
		{"one size", 10000, 0, 5 * time.Second, func(*rand.Rand) int { return 4000 }, 0, 0.02},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(7, 8))
			var est rateEstimator
			eng := engineTime{rate: c.rate, fixed: c.fixed}
			now := time.Unix(1_700_000_000, 0)
			for range 200 {
				now = now.Add(time.Duration(rng.ExpFloat64() * float64(c.gap)))
				n := c.tokens(rng)
				at := eng.firstToken(now, n)
				if rng.Float64() < c.outliers {
					at = at.Add(time.Duration(rng.IntN(10)) * time.Second)
				}
				est.observe(at, n, at.Sub(now))
			}
			if got := est.get(); math.Abs(got-c.rate) > c.tol*c.rate {
				t.Errorf("rate = %.0f, want %.0f within %.0f %%", got, c.rate, 100*c.tol)
			}
		})
	}
}

// An engine computes several short prompts in one step; their first tokens come together.
func TestRateOfBatches(t *testing.T) {
	var est rateEstimator
	now := time.Unix(1_700_000_000, 0)
	rng := rand.New(rand.NewPCG(1, 1))
	for range 60 {
		now = now.Add(10 * time.Second)
		k := 1 + rng.IntN(4)
		at := now.Add(10*time.Millisecond + time.Duration(k)*100*time.Millisecond)
		for i := range k {
			est.observe(at.Add(time.Duration(i)*100*time.Microsecond), 1000, at.Sub(now))
		}
	}
	if got := est.get(); math.Abs(got-10000) > 500 {
		t.Errorf("rate = %.0f, want 10000", got)
	}
}

func TestRateFollowsAChange(t *testing.T) {
	var est rateEstimator
	rng := rand.New(rand.NewPCG(1, 2))
	now := time.Unix(1_700_000_000, 0)
	for _, rate := range []float64{20000, 5000, 20000} {
		eng := engineTime{rate: rate, fixed: 10 * time.Millisecond}
		for range 50 {
			now = now.Add(3 * time.Second)
			n := rng.IntN(4000)
			at := eng.firstToken(now, n)
			est.observe(at, n, at.Sub(now))
		}
		if got := est.get(); math.Abs(got-rate) > 0.05*rate {
			t.Errorf("rate = %.0f, want %.0f", got, rate)
		}
	}
}

func TestRateIsUnknownOrSane(t *testing.T) {
	var est rateEstimator
	now := time.Unix(1_700_000_000, 0)
	est.observe(now, 100, 0)
	est.observe(now, -5, time.Second)
	for range 50 { // Nothing but hits says nothing of the rate.
		now = now.Add(time.Second)
		est.observe(now, 16, 20*time.Millisecond)
	}
	if got := est.get(); got != 0 {
		t.Errorf("rate = %v from hits only, want 0", got)
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 5000 {
		now = now.Add(time.Duration(rng.IntN(1e9)))
		est.observe(now, rng.IntN(1e6), time.Duration(rng.IntN(1e10)))
		if got := est.get(); math.IsNaN(got) || got < 0 || got > rateMax {
			t.Fatalf("rate = %v", got)
		}
	}
}

func BenchmarkRate(b *testing.B) {
	var est rateEstimator
	rng := rand.New(rand.NewPCG(1, 2))
	now := time.Unix(1_700_000_000, 0)
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Second)
		est.observe(now, rng.IntN(8000), time.Duration(rng.IntN(1e9)))
	}
}
