package openai

import (
	"bytes"
	"mime"
	"strconv"
)

// maxEventBytes bounds what an AnswerScanner keeps of one event or of one JSON answer. Longer ones pass unread.
const maxEventBytes = 4 << 20

// Usage is the engine's own account of a request.
type Usage struct {
	// PromptTokens and CompletionTokens are the engine's counts.
	PromptTokens, CompletionTokens int
	// CachedTokens is how many of the prompt's tokens the engine took from its KV cache; only if CachedKnown.
	CachedTokens int
	// CachedKnown says that the engine told CachedTokens: vLLM does with --enable-prompt-tokens-details.
	CachedKnown bool
}

// Answer is what an AnswerScanner has read.
type Answer struct {
	// Usage is the last usage of the answer; only if HasUsage.
	Usage    Usage
	HasUsage bool
	// Text is the generated text of the answer's only choice. It is exact only if TextExact.
	Text []byte
	// TextExact says that Text is all that was generated: one choice, plain text alone, within the scanner's limit.
	TextExact bool
	// Finish is the finish_reason of the first choice; empty if none came.
	Finish string
	// Done says that the answer came to its own end: the event [DONE] of a stream or its like in the other APIs, or a whole
	// JSON object.
	Done bool
	// Failed says that an error took the place of an answer, or of the rest of one.
	Failed bool
}

// AnswerScanner reads an answer as it passes by, in pieces of any size, and finds its first token, its usage, its end and,
// of chats and completions, its text. It never changes, keeps back or delays a byte, and holds at most one event
// plus the text in memory. What it cannot read it passes over: it is for accounting, not for judging.
//
// It is not safe for concurrent use.
type AnswerScanner struct {
	maxText int
	stream  bool
	read    bool // the content type is one to be read

	line  []byte // an unfinished line of a stream, or the JSON answer so far
	data  []byte // the data of the event so far
	long  bool   // the line is longer than maxEventBytes: its rest passes unread
	skip  bool   // so is the event
	lost  bool   // something of the answer passed unread
	begun bool   // a line has been read: a byte order mark can come no more
	cr    bool   // the last byte was a CR: an LF that follows belongs to it
	first bool
	mixed bool // more than one choice, or something besides plain text
	input inputTokens
	ans   Answer
}

// NewAnswerScanner returns a scanner for an answer with the given Content-Type to a request to endpoint ep. At most
// maxText bytes of generated text are kept; 0 keeps none.
func NewAnswerScanner(ep Endpoint, contentType string, maxText int) *AnswerScanner {
	s := &AnswerScanner{maxText: maxText, mixed: ep != Chat && ep != Completions}
	kind, _, err := mime.ParseMediaType(contentType)
	if err == nil {
		s.stream = kind == "text/event-stream"
		s.read = s.stream || kind == "application/json"
	}
	return s
}

// Stream says whether the answer is a stream of events.
func (s *AnswerScanner) Stream() bool { return s.stream }

// Scan reads the next piece. It returns true for the piece that brings the first token: the first generated text, or
// reasoning, or call of a tool. The event that only names the role, and comments, are none.
func (s *AnswerScanner) Scan(p []byte) bool {
	before := s.first
	switch {
	case !s.read:
	case s.stream:
		s.scanStream(p)
	case s.lost || len(s.line)+len(p) > maxEventBytes:
		s.lost, s.line = true, nil
	default:
		s.line = append(s.line, p...)
	}
	return s.first && !before
}

// End tells that the answer is over and returns what was read of it. A JSON answer is read only now.
func (s *AnswerScanner) End() Answer {
	if s.read && !s.stream && !s.lost && len(s.line) > 0 {
		s.event(s.line)
		s.line = nil
	}
	s.ans.TextExact = s.ans.Done && !s.ans.Failed && !s.mixed && !s.lost && s.maxText > 0 && s.ans.Finish != ""
	return s.ans
}

// scanStream cuts p into lines, which end with LF, CR or both, as the specification of server-sent events says.
func (s *AnswerScanner) scanStream(p []byte) {
	for len(p) > 0 {
		if s.cr {
			s.cr = false
			if p[0] == '\n' {
				p = p[1:]
				continue
			}
		}
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			end = bytes.IndexByte(p, '\r')
		} else if cr := bytes.IndexByte(p[:end], '\r'); cr >= 0 {
			end = cr
		}
		if end < 0 {
			s.keep(p)
			return
		}
		line := p[:end]
		if len(s.line) > 0 || s.long {
			s.keep(line)
			line = s.line
		}
		s.cr = p[end] == '\r'
		p = p[end+1:]
		if s.long {
			s.long, s.skip = false, true
		} else {
			s.streamLine(line)
		}
		s.line = s.line[:0]
	}
}

// keep adds p to the unfinished line, unless that is too long.
func (s *AnswerScanner) keep(p []byte) {
	if s.long || len(s.line)+len(p) > maxEventBytes {
		s.long, s.lost, s.line = true, true, s.line[:0]
		return
	}
	s.line = append(s.line, p...)
}

// streamLine takes one line of an event.
func (s *AnswerScanner) streamLine(line []byte) {
	if !s.begun {
		s.begun = true
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
	}
	if len(line) == 0 {
		if len(s.data) > 0 && !s.skip {
			s.event(s.data)
		}
		s.data, s.skip = s.data[:0], false
		return
	}
	value, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return // a comment, or a field without meaning here
	}
	value = bytes.TrimPrefix(value, []byte(" "))
	if len(s.data)+len(value) >= maxEventBytes {
		s.lost, s.skip = true, true
		return
	}
	if len(s.data) > 0 {
		s.data = append(s.data, '\n')
	}
	s.data = append(s.data, value...)
}

// event reads the data of one event, or a whole JSON answer.
func (s *AnswerScanner) event(data []byte) {
	if s.stream && string(data) == "[DONE]" {
		s.ans.Done = true
		return
	}
	sc := scanner{data: data}
	sc.space()
	if sc.peek() != '{' {
		return
	}
	ok := sc.object(maxDepth, func(key []byte) bool {
		switch string(key) {
		case `"choices"`:
			return s.choices(&sc)
		case `"usage"`:
			return s.usage(&sc)
		case `"message"`, `"response"`: // events of Messages and Responses carry it inside
			if sc.peek() == '{' {
				return sc.object(maxDepth, func(key []byte) bool {
					if string(key) == `"usage"` {
						return s.usage(&sc)
					}
					return sc.value(maxDepth)
				})
			}
		case `"type"`:
			start := sc.pos
			if !sc.value(maxDepth) {
				return false
			}
			s.typed(sc.data[start:sc.pos])
			return true
		case `"error"`:
			if sc.peek() != 'n' {
				s.ans.Failed = true
			}
		}
		return sc.value(maxDepth)
	})
	if !s.stream && ok && sc.atEnd() {
		s.ans.Done = true
	}
}

// typed takes the type of an event of Messages or Responses.
func (s *AnswerScanner) typed(name []byte) {
	if !s.stream {
		return
	}
	switch string(name) {
	case `"message_stop"`, `"response.completed"`, `"response.incomplete"`:
		s.ans.Done = true
	case `"response.failed"`, `"error"`:
		s.ans.Failed = true
	case `"content_block_delta"`:
		s.first = true
	default:
		if bytes.HasPrefix(name, []byte(`"response.`)) && bytes.HasSuffix(name, []byte(`.delta"`)) {
			s.first = true
		}
	}
}

// choices reads the array of choices.
func (s *AnswerScanner) choices(sc *scanner) bool {
	if sc.peek() != '[' {
		return sc.value(maxDepth)
	}
	return sc.array(maxDepth, func(i int) bool {
		if i > 0 {
			s.mixed = true
		}
		if sc.peek() != '{' {
			return sc.value(maxDepth)
		}
		return sc.object(maxDepth, func(key []byte) bool {
			switch string(key) {
			case `"index"`:
				if n, ok := sc.integer(); ok {
					s.mixed = s.mixed || n != 0
					return true
				}
			case `"text"`:
				return s.text(sc)
			case `"delta"`, `"message"`:
				return s.message(sc)
			case `"finish_reason"`:
				if sc.peek() == '"' {
					start := sc.pos
					if !sc.str() {
						return false
					}
					s.first = true // a token that ends the answer need not have a text
					if i == 0 {
						s.ans.Finish = unquote(sc.data[start:sc.pos])
					}
					return true
				}
			}
			return sc.value(maxDepth)
		})
	})
}

// message reads a message, or a piece of one.
func (s *AnswerScanner) message(sc *scanner) bool {
	if sc.peek() != '{' {
		return sc.value(maxDepth)
	}
	return sc.object(maxDepth, func(key []byte) bool {
		switch string(key) {
		case `"content"`:
			return s.text(sc)
		case `"reasoning"`, `"reasoning_content"`, `"refusal"`, `"tool_calls"`, `"function_call"`, `"audio"`:
			start := sc.pos
			if !sc.value(maxDepth) {
				return false
			}
			switch string(sc.data[start:sc.pos]) {
			case `null`, `""`, `[]`:
			default:
				s.first, s.mixed = true, true
			}
			return true
		}
		return sc.value(maxDepth)
	})
}

// text reads generated text.
func (s *AnswerScanner) text(sc *scanner) bool {
	if sc.peek() != '"' {
		return sc.value(maxDepth)
	}
	start := sc.pos
	if !sc.str() {
		return false
	}
	raw := sc.data[start:sc.pos]
	if len(raw) == 2 {
		return true
	}
	s.first = true
	if s.maxText == 0 || s.mixed {
		return true
	}
	if len(s.ans.Text)+len(raw) > s.maxText {
		s.mixed, s.ans.Text = true, nil
		return true
	}
	s.ans.Text = append(s.ans.Text, unquote(raw)...)
	return true
}

// inputTokens are the parts of a prompt as Messages counts them.
type inputTokens struct{ fresh, read, written int }

// usage reads the account. Engines may send one with every event, or in parts: what a later one names replaces what an
// earlier one said.
func (s *AnswerScanner) usage(sc *scanner) bool {
	if sc.peek() != '{' {
		return sc.value(maxDepth)
	}
	u := s.ans.Usage
	ok := sc.object(maxDepth, func(key []byte) bool {
		switch string(key) {
		case `"prompt_tokens"`:
			return sc.count(&u.PromptTokens)
		case `"completion_tokens"`, `"output_tokens"`:
			return sc.count(&u.CompletionTokens)
		case `"input_tokens"`:
			return sc.count(&s.input.fresh)
		case `"cache_creation_input_tokens"`:
			return sc.count(&s.input.written)
		case `"cache_read_input_tokens"`:
			u.CachedKnown = u.CachedKnown || sc.peek()-'0' <= 9
			if !sc.count(&s.input.read) {
				return false
			}
			u.CachedTokens = s.input.read
			return true
		case `"prompt_tokens_details"`, `"input_tokens_details"`:
			if sc.peek() != '{' {
				return sc.value(maxDepth)
			}
			return sc.object(maxDepth, func(key []byte) bool {
				if string(key) == `"cached_tokens"` {
					u.CachedKnown = u.CachedKnown || sc.peek()-'0' <= 9
					return sc.count(&u.CachedTokens)
				}
				return sc.value(maxDepth)
			})
		}
		return sc.value(maxDepth)
	})
	if !ok {
		return false
	}
	// Messages counts what came from the cache, and what went into it, apart from the rest of the prompt.
	if n := s.input.fresh + s.input.read + s.input.written; n > 0 {
		u.PromptTokens = n
	}
	s.ans.Usage, s.ans.HasUsage = u, true
	return true
}

// count reads a number into n if it is a whole one, else passes over the value.
func (s *scanner) count(n *int) bool {
	if v, ok := s.integer(); ok {
		*n = v
		return true
	}
	return s.value(maxDepth)
}

// integer reads a whole number. It leaves pos alone if the value is anything else.
func (s *scanner) integer() (int, bool) {
	start := s.pos
	if s.peek() == '-' {
		s.pos++
	}
	if s.digits() && s.peek() != '.' && s.peek()|0x20 != 'e' {
		if n, err := strconv.Atoi(string(s.data[start:s.pos])); err == nil {
			return n, true
		}
	}
	s.pos = start
	return 0, false
}
