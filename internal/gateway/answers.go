package gateway

import (
	"bytes"
	"context"
	"encoding/json"
	"sync"
	"time"

	"prefixgate/internal/block"
	"prefixgate/internal/openai"
	"prefixgate/internal/replica"
	"prefixgate/internal/tokenize"
)

const (
	// maxAnswerText bounds the text of an answer that is kept to be recorded, in bytes: some 250,000 tokens.
	maxAnswerText = 1 << 20
	// maxAnswerBody bounds the body of a request that is kept with it.
	maxAnswerBody = 8 << 20
	// maxQueuedAnswers and maxQueuedBytes bound what waits. Answers come at the rate of requests and take a fraction of a
	// millisecond each, so a queue that is full means that the machine has no time for it.
	maxQueuedAnswers = 1024
	maxQueuedBytes   = 128 << 20
	// answerBudget bounds the work for one answer.
	answerBudget = time.Second
)

// answer is what a replica has generated, on its way into the index.
type answer struct {
	tokens *tokenize.Model
	id     replica.ID
	scope  block.Scope
	// chain is the prompt's.
	chain []block.Hash
	// req is the request; its body is held until the answer is recorded.
	req    *openai.Request
	prompt tokenize.Encoded // released once the answer is recorded
	text   []byte
	// stopped says that the model ended the answer by a token of its own, which is not part of the text.
	stopped   bool
	completed int // generated tokens as the engine counted them; 0 if it did not tell
}

// ids are the prompt's.
func (a *answer) ids() []uint32 { return a.prompt.Prompts[0].IDs }

// answers records what replicas hold after they have answered: not only the prompt, but also the tokens they generated,
// with which the next turn of the conversation will begin. It works behind the requests, in one goroutine, and drops what
// comes faster.
//
// What the engine holds is prompt plus generated tokens, less the last one, whose keys and values are only computed with
// the token after it. The gateway sees the text, not the tokens; it renders the conversation with the answer as an
// unfinished last message, encodes that, and takes the result if it begins with the prompt. Where a template does not let
// a next turn begin so (it drops reasoning, say), the chains part at that place by themselves and nothing wrong is matched.
type answers struct {
	g     *Gateway
	queue chan answer
	mu    sync.Mutex
	// bytes is guarded by mu.
	bytes int
}

func newAnswers(g *Gateway) *answers {
	return &answers{g: g, queue: make(chan answer, maxQueuedAnswers)}
}

// run records answers until ctx is done.
func (s *answers) run(ctx context.Context) {
	for {
		select {
		case a := <-s.queue:
			s.charge(-a.size())
			s.record(ctx, a)
		case <-ctx.Done():
			return
		}
	}
}

func (a *answer) size() int { return len(a.req.Body) + len(a.text) + 4*len(a.ids()) }

// charge adds to what the queue holds and returns the sum.
func (s *answers) charge(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += n
	s.g.metrics.answerBytes.Set(float64(s.bytes))
	return s.bytes
}

// put queues an answer, or drops it.
func (s *answers) put(a answer) {
	if len(a.req.Body) > maxAnswerBody {
		s.g.metrics.drops[dropSize].Inc()
		return
	}
	if s.charge(a.size()) <= maxQueuedBytes {
		select {
		case s.queue <- a:
			return
		default:
		}
	}
	s.charge(-a.size())
	s.g.metrics.drops[dropQueue].Inc()
}

// record tokenizes one answer and credits its replica.
func (s *answers) record(ctx context.Context, a answer) {
	defer func() {
		if v := recover(); v != nil {
			s.g.caught(v)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, answerBudget)
	defer cancel()
	defer a.prompt.Release()
	encoded, err := a.tokens.Encode(ctx, continued(a.req, a.text))
	defer encoded.Release()
	if err != nil || len(encoded.Prompts) != 1 {
		s.g.metrics.drops[dropTokens].Inc()
		return
	}
	ids, before, marks := encoded.Prompts[0].IDs, a.ids(), a.prompt.Prompts[0].Marks
	if len(ids) <= len(before) || !startsWith(ids, before) {
		s.g.metrics.drops[dropTemplate].Inc()
		return
	}
	// Of the generated tokens all but the last are in the cache; one that ends the answer is not part of the text.
	held := len(ids)
	if !a.stopped {
		held--
	}
	if a.completed > 0 {
		held = min(held, len(before)+a.completed-1)
	}
	size := a.scope.BlockTokens
	if held/size <= len(a.chain) {
		return // the prompt's own record says it all
	}
	chain := make([]block.Hash, len(a.chain), held/size)
	copy(chain, a.chain)
	if n := len(chain); n > 0 && len(marks) == 0 {
		chain = block.AppendChain(chain, chain[n-1], ids[n*size:held], size, nil) // h(i) depends on h(i-1) and block i alone
	} else {
		chain = block.AppendChain(chain[:0], a.scope.Root(), ids[:held], size, marks)
	}
	s.g.index.Record(a.id, chain)
	s.g.metrics.records[recordAnswer].Inc()
}

func startsWith(ids, prefix []uint32) bool {
	for i, id := range prefix {
		if ids[i] != id {
			return false
		}
	}
	return true
}

// continued returns req with the answer's text as an unfinished last message, or at the end of its prompt.
func continued(req *openai.Request, text []byte) *openai.Request {
	next := *req
	if req.Endpoint == openai.Completions {
		p := req.Prompts[0]
		p.Text += string(text)
		next.Prompts = []openai.Prompt{p}
		return &next
	}
	yes, no := true, false
	next.AddGenerationPrompt, next.ContinueFinalMessage = &no, &yes
	list := bytes.TrimSpace(req.Messages)
	list = bytes.TrimSpace(list[:len(list)-1]) // without the bracket
	messages := make([]byte, 0, len(list)+len(text)+64)
	messages = append(messages, list...)
	if len(list) > 1 {
		messages = append(messages, ',')
	}
	messages = append(messages, `{"role":"assistant","content":`...)
	messages = append(messages, quote(string(text))...)
	next.Messages = append(messages, `}]`...)
	return &next
}

// quote returns s as a JSON string.
func quote(s string) []byte {
	q, err := json.Marshal(s)
	if err != nil {
		panic("BUG: a string that does not marshal: " + err.Error())
	}
	return q
}

// keepText is how much of the answer's text is to be kept, in bytes; 0 if it will not be recorded.
func (x *exchange) keepText() int {
	switch {
	case x.loadOnly != "" || len(x.encoded.Prompts) != 1 || x.req.N != 1:
	case x.endpoint == openai.Completions && x.req.Prompts[0].Tokens != nil:
	case x.req.ContinueFinalMessage != nil && *x.req.ContinueFinalMessage:
	case x.req.AddGenerationPrompt != nil && !*x.req.AddGenerationPrompt:
	case x.req.TruncatePromptTokens != nil:
	default:
		return maxAnswerText
	}
	return 0
}

// record hands the answer over to be recorded; the prompt has been recorded when its first token came.
func (x *exchange) record() {
	a := x.current
	ans := &x.response.answer
	if x.result != outcomeOK || !a.recorded || x.loadOnly != "" {
		return
	}
	if !ans.TextExact || len(ans.Text) == 0 || x.keepText() == 0 {
		x.g.metrics.drops[dropShape].Inc()
		return
	}
	completed := 0
	if ans.HasUsage {
		completed = ans.Usage.CompletionTokens
	}
	x.g.answers.put(answer{
		tokens: x.tokens, id: a.id, scope: x.scope(a.blockTokens), chain: a.chains[0], req: x.req, prompt: x.encoded, text: ans.Text,
		stopped: ans.Finish == "stop", completed: completed,
	})
	x.encoded = tokenize.Encoded{} // it is the answer's now
}
