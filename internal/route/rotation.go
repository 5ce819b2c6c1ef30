package route

import "sync/atomic"

// roundRobin takes the allowed candidates by turns, in the order given. With unlike weights it visits each in proportion, as
// evenly spread as a golden-ratio sequence is.
type roundRobin struct {
	turn atomic.Uint64
}

func (p *roundRobin) cost(*Request, *Candidate, survey) float64 { return 0 }

func (p *roundRobin) pick(req *Request, candidates []Candidate, s survey) Decision {
	turn := p.turn.Add(1) - 1
	d := Decision{Reason: ReasonRotation}
	if s.evenWeights() {
		d.Index = nth(req, candidates, s, int(turn%uint64(s.allowed)))
	} else {
		const golden = 0x9e3779b97f4a7c15 // 2^64 divided by the golden ratio.
		d.Index = atWeight(req, candidates, s, unit(turn*golden)*s.weight)
	}
	return d
}

// unit maps x to [0, 1).
func unit(x uint64) float64 { return float64(x>>11) / (1 << 53) }

// nth returns the index of the n-th allowed candidate.
func nth(req *Request, candidates []Candidate, s survey, n int) int {
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
func atWeight(req *Request, candidates []Candidate, s survey, at float64) int {
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
