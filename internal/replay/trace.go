// Package replay runs a workload over simulated replicas and the project's own routing, in virtual time.
//
// In go a workload (a recorded trace or a synthetic one) and, for each run, a policy. Out come figures: times to first token, hit
// rates, how the load was spread, and how well all of it was predicted. What decides is the code that decides in production,
// packages route and index; what is simulated is the rest of the world: engines (package sim), gateways that see each other's state
// late, and scrapes. Nothing sleeps and nothing is random but what the seed says, so the same options give the same figures on every
// machine, as fast as it can compute.
//
// Live is the counterpart: the same workload sent to a real gateway, in real time or faster, and what it predicted compared with
// what was measured.
package replay

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"sort"
	"time"

	"prefixgate/internal/block"
)

// Request is one request of a workload.
type Request struct {
	// At is when it arrives, from the start of the workload.
	At time.Duration
	// Offset is by how much it probably arrived later than At, where a trace's clock is too coarse to tell (see Ticks).
	Offset time.Duration
	// PromptTokens and OutputTokens are the lengths of prompt and answer, at least 1.
	PromptTokens, OutputTokens int
	// Chain are the hashes of the prompt's full blocks.
	Chain []block.Hash
	// TextPrefix, SimHash and Session are as in route.Request.
	TextPrefix, SimHash, Session uint64
	// Body is the HTTP body of a recorded request, for Live; nil if the workload has only token counts.
	Body []byte
	// Path is the HTTP path that Body belongs to.
	Path string
}

// Workload yields requests in order of arrival. It is read by one goroutine at a time.
type Workload interface {
	// Next returns the next request; ok is false at the end. Its slices stay valid and unchanged after the next call.
	Next() (r Request, ok bool)
	// Len returns the number of requests in all.
	Len() int
	// BlockTokens is the size of the blocks of Request.Chain.
	BlockTokens() int
}

// Trace is a recorded workload, held in memory.
type Trace struct {
	Requests    []Request
	blockTokens int
}

// Open returns the workload from its beginning; several may be read at once.
func (t *Trace) Open() Workload { return &traceReader{trace: t} }

type traceReader struct {
	trace *Trace
	next  int
}

func (r *traceReader) Next() (Request, bool) {
	if r.next == len(r.trace.Requests) {
		return Request{}, false
	}
	r.next++
	return r.trace.Requests[r.next-1], true
}

func (r *traceReader) Len() int         { return len(r.trace.Requests) }
func (r *traceReader) BlockTokens() int { return r.trace.blockTokens }

// mooncakeBlock is the block size of the Mooncake traces, in tokens.
const mooncakeBlock = 512

// ReadMooncake reads a trace in the format of the Mooncake paper: JSON lines with timestamp in milliseconds, input_length
// and output_length in tokens, and hash_ids, one id for each block of 512 tokens of which the last may be partial. Equal ids mean
// equal blocks with equal blocks before.
//
// The traces name no clients. Sessions are inferred: a request whose prompt repeats more than the trace's common first
// blocks continues the session that its deepest repeated block belongs to.
func ReadMooncake(r io.Reader) (*Trace, error) {
	t := &Trace{blockTokens: mooncakeBlock}
	owner := make(map[uint64]uint64) // Block id to the session that brought it.
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 64<<20)
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var line struct {
			Timestamp    float64  `json:"timestamp"`
			InputLength  int      `json:"input_length"`
			OutputLength int      `json:"output_length"`
			HashIDs      []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if line.InputLength < 1 || len(line.HashIDs) < line.InputLength/mooncakeBlock {
			return nil, fmt.Errorf("line %d: input_length %d with %d hash_ids, want at least 1 token and an id for each %d tokens", n, line.InputLength, len(line.HashIDs), mooncakeBlock)
		}
		req := Request{
			At:           time.Duration(line.Timestamp * float64(time.Millisecond)),
			PromptTokens: line.InputLength,
			OutputTokens: max(1, line.OutputLength),
		}
		h := uint64(0)
		for _, id := range line.HashIDs[:line.InputLength/mooncakeBlock] {
			h = mix(h ^ mix(id+1))
			req.Chain = append(req.Chain, block.Hash(h))
		}
		req.SimHash = simHash(line.HashIDs)
		req.TextPrefix = prefixOf(req.Chain, mooncakeBlock)
		session := uint64(n)
		for i := len(line.HashIDs) - 1; i >= commonBlocks; i-- {
			if s, ok := owner[line.HashIDs[i]]; ok {
				session = s
				break
			}
		}
		for _, id := range line.HashIDs {
			if _, ok := owner[id]; !ok {
				owner[id] = session
			}
		}
		req.Session = mix(session)
		t.Requests = append(t.Requests, req)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("read trace: it holds no request")
	}
	t.sort()
	return t, nil
}

// commonBlocks is how many first blocks of a Mooncake trace say nothing about the session.
const commonBlocks = 1

// sort orders by arrival, starting at 0.
func (t *Trace) sort() {
	sort.SliceStable(t.Requests, func(i, j int) bool { return t.Requests[i].At < t.Requests[j].At })
	start := t.Requests[0].At
	for i := range t.Requests {
		t.Requests[i].At -= start
	}
	t.offsets()
}

// offsets spreads requests that have one timestamp evenly over the trace's resolution, the smallest distance of two timestamps.
func (t *Trace) offsets() {
	resolution := time.Duration(math.MaxInt64)
	for i := 1; i < len(t.Requests); i++ {
		if d := t.Requests[i].At - t.Requests[i-1].At; d > 0 {
			resolution = min(resolution, d)
		}
	}
	if resolution == math.MaxInt64 {
		return
	}
	for i := 0; i < len(t.Requests); {
		end := i
		for end < len(t.Requests) && t.Requests[end].At == t.Requests[i].At {
			end++
		}
		for j := i; j < end; j++ {
			t.Requests[j].Offset = resolution * time.Duration(j-i) / time.Duration(end-i)
		}
		i = end
	}
}

// Scale makes the trace arrive speed times as fast and keeps at most limit requests; 0 keeps all.
func (t *Trace) Scale(speed float64, limit int) {
	if limit > 0 && limit < len(t.Requests) {
		t.Requests = t.Requests[:limit]
	}
	for i := range t.Requests {
		t.Requests[i].At = time.Duration(float64(t.Requests[i].At) / speed)
		t.Requests[i].Offset = time.Duration(float64(t.Requests[i].Offset) / speed)
	}
}

// prefixTokens is how many tokens of a prompt's beginning make its TextPrefix, the default of the prefix-hash policy.
const prefixTokens = 1024

// prefixOf returns the key of the first prefixTokens tokens, in whole blocks, at least one block; 0 if there is none.
func prefixOf(chain []block.Hash, blockTokens int) uint64 {
	if len(chain) == 0 {
		return 0
	}
	return uint64(chain[min(len(chain), max(1, prefixTokens/blockTokens))-1])
}

// simHash is route.SimHashOf with blocks for features, for workloads that have no tokens.
func simHash(ids []uint64) uint64 {
	var votes [64]int
	for _, id := range ids {
		h := mix(id + 1)
		for b := range votes {
			votes[b] += int(h>>b&1)*2 - 1
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

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
