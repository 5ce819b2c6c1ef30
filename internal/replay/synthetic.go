package replay

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"prefixgate/internal/block"
)

// Synthetic describes a made-up workload.
type Synthetic struct {
	// Kind is one of Kinds.
	Kind string
	// Requests is how many there are. Default 10,000.
	Requests int
	// Rate is how many arrive in a second on average. Default: what keeps 8 replicas of 8,000 tokens/s about half busy
	// without any cache hit, times the number of replicas given to Open.
	Rate float64
	// BlockTokens is the block size in tokens. Default 64.
	BlockTokens int
	// Seed decides everything random.
	Seed uint64
}

// Kinds returns the names of the synthetic workloads.
//
//   - chat: conversations of some turns; each begins with one of a few dozen system prompts, a handful of which are popular.
//   - agents: long tool loops over a long list of tools, each step adding the tool's output, seconds apart.
//   - rag: single questions over documents from a shared collection, some read often; documents stand before the question.
//   - burst: light chat, and once a minute a burst of long cold prompts that share nothing.
func Kinds() []string { return []string{"chat", "agents", "rag", "burst"} }

// meanPrompt is about how long the prompts of each kind are, in tokens; it only sets the default rate.
var meanPrompt = map[string]float64{"chat": 3300, "agents": 36000, "rag": 11000, "burst": 3600}

// Validate returns all that is wrong, joined.
func (s Synthetic) Validate() error {
	var errs []error
	if !slices.Contains(Kinds(), s.Kind) {
		errs = append(errs, fmt.Errorf("workload: got %q, want one of %s", s.Kind, strings.Join(Kinds(), ", ")))
	}
	if s.Requests < 0 {
		errs = append(errs, fmt.Errorf("requests: got %d, want at least 1", s.Requests))
	}
	if s.Rate < 0 || math.IsNaN(s.Rate) || math.IsInf(s.Rate, 0) {
		errs = append(errs, fmt.Errorf("rate: got %v, want requests per second", s.Rate))
	}
	if s.BlockTokens < 0 {
		errs = append(errs, fmt.Errorf("block-tokens: got %d, want at least 1", s.BlockTokens))
	}
	return errors.Join(errs...)
}

// Open returns the workload from its beginning, made while it is read: it takes memory for the sessions that go on at one time only.
func (s Synthetic) Open(replicas int) (Workload, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	if s.Requests == 0 {
		s.Requests = 10_000
	}
	if s.BlockTokens == 0 {
		s.BlockTokens = 64
	}
	if s.Rate == 0 {
		s.Rate = 0.5 * 8000 * float64(replicas) / meanPrompt[s.Kind]
	}
	m := &maker{Synthetic: s, rng: rand.New(rand.NewPCG(s.Seed, 0x776f726b6c6f6164))}
	m.start = map[string]func(){"chat": m.chat, "agents": m.agent, "rag": m.question, "burst": m.mixed}[s.Kind]
	m.turns = map[string]float64{"chat": 5, "agents": 30, "rag": 1, "burst": 2}[s.Kind]
	m.documents = m.zipf(map[string]int{"chat": 40, "agents": 12, "rag": 2000, "burst": 10}[s.Kind], 1.1)
	m.nextStart = m.gap()
	return m, nil
}

// maxContext is the length in tokens at which a session ends.
const maxContext = 100_000

// segment is a run of tokens that is the same wherever it occurs.
type segment struct {
	id     uint64
	tokens int
}

// session is a conversation or tool loop in progress.
type session struct {
	at       time.Duration
	id       uint64
	segments []segment
	turns    int
	step     func(*session) (output int, pause time.Duration) // Adds a turn's segments.
}

// maker makes a workload.
type maker struct {
	Synthetic
	rng       *rand.Rand
	start     func() // Starts a session now.
	turns     float64
	documents []float64 // Cumulative popularity.
	now       time.Duration
	nextStart time.Duration
	live      sessions
	ids       uint64
	made      int
	burst     time.Duration // The minute of the last burst.
}

func (m *maker) Len() int         { return m.Requests }
func (m *maker) BlockTokens() int { return m.Synthetic.BlockTokens }

// Next makes the next request.
func (m *maker) Next() (Request, bool) {
	if m.made == m.Requests {
		return Request{}, false
	}
	for len(m.live) == 0 || m.nextStart <= m.live[0].at {
		m.now = m.nextStart
		m.start()
		m.nextStart += m.gap()
	}
	m.made++
	s := m.live[0]
	m.now = s.at
	output, pause := s.step(s)
	r := m.request(s, output)
	s.turns--
	if s.turns <= 0 || r.PromptTokens+output > maxContext {
		heap.Pop(&m.live)
		return r, true
	}
	// The answer becomes part of the next prompt.
	s.segments = append(s.segments, segment{id: m.id(), tokens: output})
	s.at += pause
	heap.Fix(&m.live, 0)
	return r, true
}

// gap is the time until the next session starts.
func (m *maker) gap() time.Duration {
	return time.Duration(m.rng.ExpFloat64() / (m.Rate / m.turns) * float64(time.Second))
}

func (m *maker) id() uint64 {
	m.ids++
	return mix(m.ids ^ mix(m.Seed))
}

// join starts a session with the given beginning.
func (m *maker) join(turns int, step func(*session) (int, time.Duration), beginning ...segment) {
	heap.Push(&m.live, &session{at: m.now, id: m.id(), segments: beginning, turns: turns, step: step})
}

// around draws from a log-normal distribution with the given median, cut at 16 times.
func (m *maker) around(median, sigma float64) int {
	return max(1, int(min(median*math.Exp(sigma*m.rng.NormFloat64()), 16*median)))
}

// geometric draws a number of turns with the given mean.
func (m *maker) geometric(mean float64) int {
	return 1 + int(math.Log(1-m.rng.Float64())/math.Log(1-1/max(mean, 1.000001)))
}

// zipf returns cumulative popularities of n things.
func (m *maker) zipf(n int, exponent float64) []float64 {
	c := make([]float64, n)
	sum := 0.0
	for i := range c {
		sum += math.Pow(float64(i+1), -exponent)
		c[i] = sum
	}
	return c
}

// document draws one of the shared documents. Its length, around the given median, is a function of which it is.
func (m *maker) document(median float64) segment {
	n := len(m.documents)
	at, _ := slices.BinarySearch(m.documents, m.rng.Float64()*m.documents[n-1])
	id := mix(m.Seed ^ mix(uint64(at)+1e9))
	return segment{id: id, tokens: max(1, int(median*(0.5+float64(id>>40)/(1<<24))))}
}

func (m *maker) pause(mean time.Duration) time.Duration {
	return time.Duration(m.rng.ExpFloat64() * float64(mean))
}

// answered is how long an answer takes to arrive and be read before anything else happens.
func answered(output int) time.Duration { return time.Duration(output) * 20 * time.Millisecond }

func (m *maker) chat() {
	m.join(m.geometric(m.turns), func(s *session) (int, time.Duration) {
		s.segments = append(s.segments, segment{m.id(), m.around(90, 1.2)})
		output := m.around(250, 0.8)
		return output, answered(output) + m.pause(20*time.Second)
	}, m.document(1500))
}

func (m *maker) agent() {
	m.join(m.geometric(m.turns), func(s *session) (int, time.Duration) {
		s.segments = append(s.segments, segment{m.id(), m.around(700, 1)})
		output := m.around(120, 0.7)
		return output, answered(output) + m.pause(2*time.Second)
	}, m.document(6000), segment{m.id(), m.around(600, 0.8)})
}

func (m *maker) question() {
	beginning := []segment{{id: mix(m.Seed + 77), tokens: 400}}
	for range 3 {
		beginning = append(beginning, m.document(3300))
	}
	m.join(1, func(s *session) (int, time.Duration) {
		s.segments = append(s.segments, segment{m.id(), m.around(60, 0.6)})
		return m.around(200, 0.6), 0
	}, beginning...)
}

// mixed is chat for most of the time and, once a minute, as many cold prompts within a second as otherwise come in five.
func (m *maker) mixed() {
	m.chat()
	minute := m.now / time.Minute
	if minute <= m.burst {
		return
	}
	m.burst = minute
	start := m.now
	for range max(2, int(m.Rate*5)) {
		m.now = start + time.Duration(m.rng.Int64N(int64(time.Second)))
		m.join(1, func(s *session) (int, time.Duration) {
			s.segments = append(s.segments, segment{m.id(), m.around(16_000, 0.5)})
			return m.around(200, 0.6), 0
		})
	}
	m.now = start
}

// request is a session's prompt as it now stands.
func (m *maker) request(s *session, output int) Request {
	r := Request{At: m.now, OutputTokens: output, Session: s.id}
	for _, seg := range s.segments {
		r.PromptTokens += seg.tokens
	}
	r.Chain = chainOf(make([]block.Hash, 0, r.PromptTokens/m.Synthetic.BlockTokens), s.segments, m.Synthetic.BlockTokens)
	r.TextPrefix = prefixOf(r.Chain, m.Synthetic.BlockTokens)
	r.SimHash = simHashOf(s.segments)
	return r
}

// chainOf appends the hashes of the full blocks of a prompt that consists of segments: two prompts have equal hashes exactly as far
// as they consist of equal tokens.
func chainOf(dst []block.Hash, segments []segment, blockTokens int) []block.Hash {
	h, filled := uint64(1), 0
	for _, seg := range segments {
		for offset := 0; offset < seg.tokens; {
			n := min(blockTokens-filled, seg.tokens-offset)
			h = mix(h ^ mix(seg.id+uint64(offset)) ^ uint64(n)<<32)
			offset += n
			if filled += n; filled == blockTokens {
				dst = append(dst, block.Hash(h))
				filled = 0
			}
		}
	}
	return dst
}

// simHashOf is route.SimHashOf with segments for features, weighted by length.
func simHashOf(segments []segment) uint64 {
	var votes [64]int
	for _, seg := range segments {
		h := mix(seg.id)
		for b := range votes {
			votes[b] += (int(h>>b&1)*2 - 1) * seg.tokens
		}
	}
	h := uint64(0)
	for b, v := range votes {
		if v > 0 {
			h |= 1 << b
		}
	}
	return max(h, 1)
}

// sessions is a heap by time; among equals the older session goes first.
type sessions []*session

func (s sessions) Len() int { return len(s) }
func (s sessions) Less(i, j int) bool {
	if s[i].at != s[j].at {
		return s[i].at < s[j].at
	}
	return s[i].id < s[j].id
}
func (s sessions) Swap(i, j int) { s[i], s[j] = s[j], s[i] }
func (s *sessions) Push(x any)   { *s = append(*s, x.(*session)) }
func (s *sessions) Pop() any {
	old := *s
	x := old[len(old)-1]
	old[len(old)-1] = nil
	*s = old[:len(old)-1]
	return x
}
