package replica

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

func TestFillRate(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	var f FillRate
	filled := 0.0
	step := func(blocks, size float64) {
		now = now.Add(time.Second)
		filled += blocks
		f.Observe(now, filled, size)
	}
	want := func(when string, rate float64) {
		t.Helper()
		if got := f.PerSecond(); math.Abs(got-rate) > 0.02*rate {
			t.Errorf("%s: %v blocks/s, want %v", when, got, rate)
		}
	}
	for range 9 {
		step(100, 1000)
	}
	want("a cache that has never been full evicts nothing", 0)
	for range 30 {
		step(100, 1000)
	}
	want("steady", 100)
	for range 20 {
		step(50, 1000)
	}
	want("slower, for as long as it takes to fill the cache", 50)
	for range 1000 {
		step(0, 1000)
	}
	// What was touched just before the pause is still there, and what was touched a cache's worth before that is not.
	if age := 1000 / f.PerSecond(); age < 1000 || age > 1030 {
		t.Errorf("after a pause of 1,000 s a block is kept for %v s, want those and the last 20", age)
	}
	for range 10 {
		step(100, 4000)
	}
	if got := f.PerSecond(); got <= 0 || got > 100 {
		t.Errorf("a larger cache: %v blocks/s, want what was seen so far", got)
	}
	f.Observe(now, 5, 1000)
	want("counters that fell", 0)
	f.Observe(now, math.NaN(), 1000)
	want("counters that are gone", 0)
	f.Observe(now, 5000, 0)
	want("a cache of unknown size", 0)

	// A gateway that comes later knows from the counters that the cache is full, and goes by what it has seen.
	var late FillRate
	late.Observe(now, 1e6, 1000)
	if got := late.PerSecond(); got != 0 {
		t.Errorf("after one reading: %v, want 0", got)
	}
	late.Observe(now.Add(time.Second), 1e6+70, 1000)
	if got := late.PerSecond(); got != 70 {
		t.Errorf("after two readings: %v, want 70", got)
	}
}

// Against a list of all readings: the time to fill the cache last is right to a step and a reading, and what is kept stays bounded.
func TestFillRateAgainstAllReadings(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 9))
	for range 50 {
		type reading struct {
			at     time.Time
			blocks float64
		}
		now := time.Unix(1_700_000_000, 0)
		size := float64(100 + rng.IntN(100_000))
		var f FillRate
		var all []reading
		filled := 0.0
		for range 2000 {
			dt := time.Duration(1+rng.IntN(2000)) * time.Millisecond
			now = now.Add(dt)
			if rng.IntN(3) > 0 {
				filled += float64(rng.IntN(int(size/50) + 1))
			}
			f.Observe(now, filled, size)
			all = append(all, reading{now, filled})
			if len(f.points) > 2*fillSteps {
				t.Fatalf("%d points are kept", len(f.points))
			}
			// The reading before which a whole cache was filled, and the one a step earlier.
			exact, loose := -1, -1
			for i, r := range all {
				if r.blocks <= filled-size {
					exact = i
				}
				if r.blocks <= filled-size-2*size/fillSteps-size/50 {
					loose = i
				}
			}
			if loose < 0 {
				continue
			}
			age := size / f.PerSecond()
			if least, most := now.Sub(all[exact].at).Seconds(), now.Sub(all[loose].at).Seconds(); age < 0.95*least || age > most {
				t.Fatalf("a cache of %v was filled in %v s, want %v to %v", size, age, least, most)
			}
		}
	}
}

func BenchmarkFillRate(b *testing.B) {
	var f FillRate
	now := time.Unix(1_700_000_000, 0)
	filled := 0.0
	b.ReportAllocs()
	for b.Loop() {
		now = now.Add(time.Second)
		filled += 1000
		f.Observe(now, filled, 50_000)
	}
}
