package replay

import (
	"math"
	"slices"
	"time"

	"prefixgate/internal/route"
	"prefixgate/internal/sim"
)

// Result are the figures of one run. Times are in seconds of virtual time. It holds nothing that differs between two runs with the
// same options but for Timing.
type Result struct {
	// Policy is the policy's name, with its options if they are not the defaults.
	Policy string `json:"policy"`
	// Requests were served; Refused could never fit into an engine's cache.
	Requests int `json:"requests"`
	Refused  int `json:"refused"`
	// TTFT is the time to first token.
	TTFT Distribution `json:"ttft_seconds"`
	// BlockHitRate is the part of all prompts' blocks, partial ones included, that came from a cache; TokenHitRate the same
	// in tokens.
	BlockHitRate float64 `json:"block_hit_rate"`
	TokenHitRate float64 `json:"token_hit_rate"`
	// RequestImbalance is the highest number of requests that a replica got over the mean; WorkImbalance the same for
	// uncached prompt tokens; LoadImbalance the mean over time of the highest over the mean number of requests in flight.
	RequestImbalance float64 `json:"request_imbalance"`
	WorkImbalance    float64 `json:"work_imbalance"`
	LoadImbalance    float64 `json:"load_imbalance"`
	// MatchAgreement is the part of the requests whose cached tokens were as predicted; OverPredicted and UnderPredicted are
	// the tokens predicted too many and too few, as parts of all prompt tokens.
	MatchAgreement float64 `json:"match_agreement"`
	OverPredicted  float64 `json:"over_predicted"`
	UnderPredicted float64 `json:"under_predicted"`
	// TTFTError is the mean absolute difference of expected and measured time to first token.
	TTFTError float64 `json:"ttft_error_seconds"`
	// Reasons count the decisions by reason.
	Reasons map[route.Reason]int `json:"reasons"`
	// Replicas are the figures by replica.
	Replicas []ReplicaResult `json:"replicas"`
	// Series are the figures over time.
	Series []Point `json:"series"`
	// Duration is when the last request ended.
	Duration float64 `json:"duration_seconds"`
	// Timing is how long the run took in real time.
	Timing Timing `json:"-"`

	ttfts                     []float64
	blocks, hitBlocks         int64
	tokens, hitTokens         int64
	predicted                 comparison
	ttftError                 float64
	loadImbalance, loadWeight float64
	bucket                    time.Duration
	deciding                  time.Duration
	started                   time.Time
	sampledAt                 time.Duration
}

// Timing are real times.
type Timing struct {
	// Wall is the whole run.
	Wall time.Duration
	// Decision is the mean of one decision: lookup and pick.
	Decision time.Duration
}

// Distribution describes many values.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
	// Quantiles are the values at 0, 1/200, … 1.
	Quantiles []float64 `json:"quantiles"`
}

// ReplicaResult are one replica's figures.
type ReplicaResult struct {
	Requests       int     `json:"requests"`
	PromptTokens   int64   `json:"prompt_tokens"`
	UncachedTokens int64   `json:"uncached_tokens"`
	Busy           float64 `json:"busy"` // Part of the time spent on prompts.
}

// Point is one stretch of time.
type Point struct {
	// At is its start in seconds.
	At float64 `json:"at"`
	// Requests are first tokens in it, TTFT their mean in seconds and HitRate the part of their prompt tokens that was cached.
	Requests int     `json:"requests"`
	TTFT     float64 `json:"ttft_seconds"`
	HitRate  float64 `json:"hit_rate"`
	// MaxLoad and MeanLoad are the highest and mean requests in flight on a replica, averaged over samples.
	MaxLoad  float64 `json:"max_load"`
	MeanLoad float64 `json:"mean_load"`

	tokens, hits int64
	samples      int
}

// maxPoints bounds a series; when it is full, neighbors are merged.
const maxPoints = 360

func newResult(w *world, policy string, requests int) *Result {
	return &Result{
		Policy:   policy,
		Reasons:  make(map[route.Reason]int),
		Replicas: make([]ReplicaResult, w.opts.Replicas),
		ttfts:    make([]float64, 0, requests),
		bucket:   time.Second,
		started:  time.Now(),
	}
}

// point returns the stretch of time that now is in.
func (r *Result) point(now time.Duration) *Point {
	for int(now/r.bucket) >= maxPoints {
		r.merge()
	}
	i := int(now / r.bucket)
	for len(r.Series) <= i {
		r.Series = append(r.Series, Point{})
	}
	return &r.Series[i]
}

// merge doubles the length of the stretches.
func (r *Result) merge() {
	r.bucket *= 2
	half := (len(r.Series) + 1) / 2
	for i := range half {
		p := r.Series[2*i]
		if 2*i+1 < len(r.Series) {
			q := r.Series[2*i+1]
			p.Requests += q.Requests
			p.TTFT += q.TTFT
			p.tokens += q.tokens
			p.hits += q.hits
			p.MaxLoad += q.MaxLoad
			p.MeanLoad += q.MeanLoad
			p.samples += q.samples
		}
		r.Series[i] = p
	}
	r.Series = r.Series[:half]
}

func (r *Result) dispatched(p *pending, reason route.Reason) {
	r.Reasons[reason]++
	rep := &r.Replicas[p.replica]
	rep.Requests++
	rep.PromptTokens += int64(p.prompt)
}

// comparison adds up how predicted cached tokens differ from the engines' own counts.
type comparison struct {
	right       int   // Requests predicted to the token.
	over, under int64 // Tokens predicted beyond what was cached, and cached beyond what was predicted.
}

func (c *comparison) add(predicted, cached int) {
	switch diff := int64(predicted - cached); {
	case diff == 0:
		c.right++
	case diff > 0:
		c.over += diff
	default:
		c.under -= diff
	}
}

func (r *Result) firstToken(w *world, p *pending, ev sim.Event) {
	ttft := (ev.At - p.at).Seconds()
	r.ttfts = append(r.ttfts, ttft)
	r.blocks += int64((p.prompt + w.blocks - 1) / w.blocks)
	r.hitBlocks += int64(ev.CachedTokens / w.blocks)
	r.tokens += int64(p.prompt)
	r.hitTokens += int64(ev.CachedTokens)
	r.predicted.add(p.predicted, ev.CachedTokens)
	r.ttftError += math.Abs(p.expected.Seconds() - ttft)
	r.Replicas[p.replica].UncachedTokens += int64(p.prompt - ev.CachedTokens)
	pt := r.point(w.now)
	pt.Requests++
	pt.TTFT += ttft
	pt.tokens += int64(p.prompt)
	pt.hits += int64(ev.CachedTokens)
}

// sample looks at the load, at most once in a second of virtual time.
func (r *Result) sample(w *world) {
	if w.now-r.sampledAt < time.Second {
		return
	}
	r.sampledAt = w.now
	highest, sum := int32(0), int32(0)
	for _, n := range w.loads {
		highest = max(highest, n)
		sum += n
	}
	pt := r.point(w.now)
	pt.samples++
	pt.MaxLoad += float64(highest)
	mean := float64(sum) / float64(len(w.loads))
	pt.MeanLoad += mean
	if sum > 0 {
		r.loadImbalance += float64(highest) // Weighted by the mean: an idle fleet's imbalance is of no interest.
		r.loadWeight += mean
	}
}

func (r *Result) finish(w *world) {
	r.Requests = len(r.ttfts)
	r.TTFT = distribution(r.ttfts)
	r.Duration = w.now.Seconds()
	n := float64(max(1, r.Requests))
	r.BlockHitRate = ratio(r.hitBlocks, r.blocks)
	r.TokenHitRate = ratio(r.hitTokens, r.tokens)
	r.MatchAgreement = float64(r.predicted.right) / n
	r.OverPredicted, r.UnderPredicted = ratio(r.predicted.over, r.tokens), ratio(r.predicted.under, r.tokens)
	r.TTFTError = r.ttftError / n
	if r.loadWeight > 0 {
		r.LoadImbalance = r.loadImbalance / r.loadWeight
	}
	var requests, work, mostRequests, mostWork float64
	for i := range r.Replicas {
		p := &r.Replicas[i]
		if r.Duration > 0 {
			p.Busy = float64(p.UncachedTokens) / w.opts.PrefillRate / r.Duration
		}
		requests += float64(p.Requests)
		work += float64(p.UncachedTokens)
		mostRequests = max(mostRequests, float64(p.Requests))
		mostWork = max(mostWork, float64(p.UncachedTokens))
	}
	if requests > 0 {
		r.RequestImbalance = mostRequests / requests * float64(len(r.Replicas))
	}
	if work > 0 {
		r.WorkImbalance = mostWork / work * float64(len(r.Replicas))
	}
	for i := range r.Series {
		p := &r.Series[i]
		p.At = (time.Duration(i) * r.bucket).Seconds()
		if p.Requests > 0 {
			p.TTFT /= float64(p.Requests)
			p.HitRate = ratio(p.hits, p.tokens)
		}
		if p.samples > 0 {
			p.MaxLoad /= float64(p.samples)
			p.MeanLoad /= float64(p.samples)
		}
	}
	r.Timing = Timing{Wall: time.Since(r.started), Decision: r.deciding / time.Duration(max(1, r.Requests))}
}

func ratio(a, b int64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// distribution sorts values and describes them.
func distribution(values []float64) Distribution {
	if len(values) == 0 {
		return Distribution{}
	}
	slices.Sort(values)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	at := func(q float64) float64 {
		i := int(math.Ceil(q*float64(len(values)))) - 1
		return values[max(0, min(i, len(values)-1))]
	}
	d := Distribution{
		Mean: sum / float64(len(values)),
		P50:  at(0.50),
		P90:  at(0.90),
		P99:  at(0.99),
		Max:  values[len(values)-1],
	}
	const steps = 200
	for i := range steps + 1 {
		d.Quantiles = append(d.Quantiles, at(float64(i)/steps))
	}
	return d
}
