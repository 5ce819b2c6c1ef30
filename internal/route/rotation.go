package route

import "sync/atomic"

// sequence is a source of keys where a request brings none: pseudorandom, different in each gateway that has its own seed, and
// the same in every run.
type sequence struct {
	seed uint64
	n    atomic.Uint64
}

func newSequence(o Options) *sequence { return &sequence{seed: mix(o.Seed)} }

// next returns the next key.
func (s *sequence) next() uint64 { return mix(s.seed ^ s.n.Add(1)) }

// key returns the request's own key for breaking ties, if it has one.
func (s *sequence) key(req *Request) uint64 {
	if req.Prefix != 0 {
		return req.Prefix
	}
	return s.next()
}

// roundRobin takes the allowed candidates by turns, in the order given. With unlike weights it visits each in proportion, as
// evenly spread as a golden-ratio sequence is.
type roundRobin struct {
	turn atomic.Uint64
}

func newRoundRobin(o Options) *roundRobin {
	p := &roundRobin{}
	p.turn.Store(o.Seed) // Gateways start at different replicas.
	return p
}

func (p *roundRobin) cost(*Request, *Candidate, *survey) float64 { return 0 }

func (p *roundRobin) pick(req *Request, candidates []Candidate, s survey) Decision {
	turn := p.turn.Add(1) - 1
	d := Decision{Reason: ReasonRotation}
	if s.evenWeights() {
		d.Index = nth(req, candidates, &s, int(turn%uint64(s.allowed)))
	} else {
		const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio.
		d.Index = atWeight(req, candidates, &s, unit(turn*golden)*s.weight)
	}
	return d
}

// randomPick takes any allowed candidate, in proportion to weight.
type randomPick struct {
	draws *sequence
}

func (p *randomPick) cost(*Request, *Candidate, *survey) float64 { return 0 }

func (p *randomPick) pick(req *Request, candidates []Candidate, s survey) Decision {
	i := atWeight(req, candidates, &s, unit(p.draws.next())*s.weight)
	return Decision{Index: i, Reason: ReasonRotation}
}

// powerOfTwo draws two different allowed candidates and takes the less loaded one.
type powerOfTwo struct {
	draws *sequence
}

func (p *powerOfTwo) cost(_ *Request, c *Candidate, _ *survey) float64 {
	return float64(c.load()) / c.weight()
}

func (p *powerOfTwo) pick(req *Request, candidates []Candidate, s survey) Decision {
	draw := p.draws.next()
	n := uint64(s.allowed)
	first := int(draw % n)
	pick := nth(req, candidates, &s, first)
	if n > 1 {
		second := int(mix(draw) % (n - 1))
		if second >= first {
			second++
		}
		other := nth(req, candidates, &s, second)
		if p.cost(req, &candidates[other], &s) < p.cost(req, &candidates[pick], &s) {
			pick = other
		}
	}
	return Decision{Index: pick, Reason: ReasonLoad}
}

// unit maps x to [0, 1).
func unit(x uint64) float64 { return float64(x>>11) / (1 << 53) }

// nth returns the index of the n-th allowed candidate.
func nth(req *Request, candidates []Candidate, s *survey, n int) int {
	for i := range candidates {
		if !s.allows(req, &candidates[i]) {
			continue
		}
		if n == 0 {
			return i
		}
		n--
	}
	panic("BUG: fewer candidates than the survey counted")
}

// atWeight returns the index of the allowed candidate that covers position at when all are laid end to end by weight.
func atWeight(req *Request, candidates []Candidate, s *survey, at float64) int {
	last := -1
	for i := range candidates {
		if !s.allows(req, &candidates[i]) {
			continue
		}
		last = i
		if at -= candidates[i].weight(); at < 0 {
			break
		}
	}
	return last
}
