package openai

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/cespare/xxhash/v2"
)

// Parse reads the body of a request to endpoint ep. It neither changes nor copies body, which must not change as long as
// the Request is in use. The error is an *Error fit for the client (status 400): body is not one JSON object, or model is
// not a string. Everything else is left to the engine.
//
// Its cost is one check for UTF-8 and one pass over the bytes, plus the decoding of Completions' prompts.
func Parse(ep Endpoint, body []byte) (*Request, error) {
	ascii, compact := survey(body)
	if !ascii && !utf8.Valid(body) {
		return nil, syntaxError(failUTF8, -1)
	}
	p := parser{scanner: scanner{data: body, compact: compact}, req: &Request{Endpoint: ep, Body: body, N: 1}}
	if bytes.HasPrefix(body, []byte("\xef\xbb\xbf")) {
		p.pos = 3
	}
	p.space()
	switch p.peek() {
	case '{':
	case 0:
		if p.pos == len(body) {
			return nil, BadRequest("invalid_json", "", "the request body is empty: send a JSON object")
		}
		return nil, syntaxError(failSyntax, p.pos)
	default:
		// Tell what is not JSON at all from JSON of the wrong kind.
		if !p.value(maxDepth) || !p.atEnd() {
			return nil, syntaxError(p.fail, p.pos)
		}
		return nil, BadRequest("invalid_json", "", "the request body is JSON, but not an object: send an object with model and the other fields")
	}
	if !p.object(maxDepth, p.field) || !p.atEnd() {
		return nil, syntaxError(p.fail, p.pos)
	}
	if p.badModel {
		return nil, BadRequest("invalid_type", "model", "model must be a string: name one of the models that GET /v1/models lists")
	}
	p.finish()
	return p.req, nil
}

func syntaxError(reason string, at int) *Error {
	where := ""
	if at >= 0 {
		where = fmt.Sprintf(" (at byte %d)", at)
	}
	return BadRequest("invalid_json", "", "the request body is not valid JSON: "+reason+where+": send one JSON object in UTF-8")
}

// atEnd skips white space and checks that nothing follows.
func (s *scanner) atEnd() bool {
	s.space()
	if s.pos != len(s.data) {
		return s.bad(failTrail)
	}
	return true
}

// fieldID numbers the fields whose type can be wrong, so that a doubled key's last value decides about that too.
type fieldID uint

const (
	fieldStream fieldID = 1 << iota
	fieldStreamOptions
	fieldMessages
	fieldPrompt
	fieldTools
	fieldDocuments
	fieldKwargs
	fieldAddGeneration
	fieldContinueFinal
	fieldAddSpecial
	fieldSalt
	fieldTruncate
	fieldEcho
	fieldN
)

// parser fills a Request in one pass of its scanner.
type parser struct {
	scanner
	req *Request

	badModel bool
	// bad has a bit for each field whose last value is of a wrong type.
	badFields fieldID
	// ownTemplate and kwargsTemplate: the client sent a template at the top level or among the kwargs.
	ownTemplate, kwargsTemplate bool
	embeds                      bool
	promptLogprobs              bool
	logprobs, topLogprobs       bool
	noMessages                  bool
}

// raw reads one value and returns it as it stands.
func (p *parser) raw() (json.RawMessage, bool) {
	start := p.pos
	if !p.value(maxDepth - 1) {
		return nil, false
	}
	return json.RawMessage(p.data[start:p.pos:p.pos]), true
}

// check records whether the last value of field was of a right type.
func (p *parser) check(f fieldID, ok bool) {
	if ok {
		p.badFields &^= f
	} else {
		p.badFields |= f
	}
}

// field reads one member of the body's object.
func (p *parser) field(key []byte) bool {
	r := p.req
	name := key[1 : len(key)-1]
	if !isPlain(name) {
		name = []byte(unquote(key))
	}
	switch string(name) {
	case "messages":
		if r.Endpoint == Chat {
			return p.messages()
		}
	case "prompt":
		if r.Endpoint == Completions {
			return p.prompt()
		}
	}
	v, ok := p.raw()
	if !ok {
		return false
	}
	null := v[0] == 'n'
	switch string(name) {
	case "model":
		p.badModel = !null && v[0] != '"'
		r.Model = text(v)
	case "stream":
		b, ok := laxBool(v)
		r.Stream = b != nil && *b
		p.check(fieldStream, ok)
	case "stream_options":
		p.check(fieldStreamOptions, null || v[0] == '{')
		b, _ := laxBool(p.member(v, "include_usage"))
		r.IncludeUsage = b != nil && *b
	case "messages":
		r.Messages = present(v)
	case "tools":
		r.Tools = present(v)
		p.check(fieldTools, null || v[0] == '[')
	case "documents":
		r.Documents = present(v)
		p.check(fieldDocuments, null || v[0] == '[')
	case "tool_choice":
		r.ToolChoice = present(v)
	case "reasoning_effort":
		r.ReasoningEffort = present(v)
	case "chat_template":
		p.ownTemplate = !null
	case "chat_template_kwargs":
		r.ChatTemplateKwargs = present(v)
		p.check(fieldKwargs, null || v[0] == '{')
		t := p.member(v, "chat_template")
		p.kwargsTemplate = t != nil && t[0] != 'n'
	case "add_generation_prompt":
		r.AddGenerationPrompt = p.boolean(fieldAddGeneration, v)
	case "continue_final_message":
		r.ContinueFinalMessage = p.boolean(fieldContinueFinal, v)
	case "add_special_tokens":
		r.AddSpecialTokens = p.boolean(fieldAddSpecial, v)
	case "cache_salt":
		r.CacheSalt = text(v)
		p.check(fieldSalt, null || r.CacheSalt != "") // The engine refuses an empty one.
	case "truncate_prompt_tokens":
		n, ok := laxInt(v)
		r.TruncatePromptTokens = n
		p.check(fieldTruncate, ok)
	case "echo":
		b := p.boolean(fieldEcho, v)
		r.Echo = b != nil && *b
	case "prompt_logprobs":
		p.promptLogprobs = !null
	case "logprobs":
		p.logprobs = !null && v[0] != 'f'
	case "top_logprobs":
		p.topLogprobs = !null
	case "prompt_embeds":
		p.embeds = !null
	case "user":
		r.User = text(v)
	case "prompt_cache_key":
		r.PromptCacheKey = text(v)
	case "n":
		n, ok := laxInt(v)
		r.N = 1
		if n != nil {
			r.N = *n
		}
		p.check(fieldN, ok)
	}
	return true
}

// finish decides what needs more than one field.
func (p *parser) finish() {
	r := p.req
	r.ChatTemplate = p.ownTemplate || p.kwargsTemplate
	r.PromptLogprobs = p.promptLogprobs || r.Echo && (r.Endpoint == Completions && p.logprobs || r.Endpoint == Chat && p.topLogprobs)
	switch {
	case r.Endpoint != Chat && r.Endpoint != Completions:
		r.LoadOnly = ReasonEndpoint
	case p.surrogate:
		r.LoadOnly = ReasonSurrogate
	case p.nonFinite:
		r.LoadOnly = ReasonNonFinite
	case r.Endpoint == Chat && r.ChatTemplate:
		r.LoadOnly = ReasonChatTemplate
	case p.embeds:
		r.LoadOnly = ReasonEmbeds
	case p.badFields != 0:
		r.LoadOnly = ReasonBadField
	case r.Endpoint == Chat && p.noMessages || r.Endpoint == Chat && r.Messages == nil:
		r.LoadOnly = ReasonNoPrompt
	case r.Endpoint == Completions && !hasPrompt(r.Prompts):
		r.LoadOnly = ReasonNoPrompt
	}
}

func hasPrompt(prompts []Prompt) bool {
	for i := range prompts {
		if prompts[i].Text != "" || len(prompts[i].Tokens) > 0 {
			return true
		}
	}
	return false
}

// messages reads the messages of a chat and finds the parts that are not text.
func (p *parser) messages() bool {
	r := p.req
	start := p.pos
	r.Images = r.Images[:0]
	r.Messages = nil
	p.noMessages = true
	if p.peek() != '[' {
		v, ok := p.raw()
		if !ok {
			return false
		}
		r.Messages = present(v)
		p.check(fieldMessages, r.Messages == nil)
		return true
	}
	allObjects := true
	ok := p.array(maxDepth-1, func(i int) bool {
		p.noMessages = false
		if p.peek() != '{' {
			allObjects = false
			return p.value(maxDepth - 2)
		}
		before := len(r.Images)
		return p.object(maxDepth-2, func(key []byte) bool {
			if string(key) != `"content"` {
				return p.value(maxDepth - 3)
			}
			r.Images = r.Images[:before] // Of a doubled key the last counts.
			if p.peek() != '[' {
				return p.value(maxDepth - 3)
			}
			return p.array(maxDepth-3, func(j int) bool { return p.part(i, j) })
		})
	})
	if !ok {
		return false
	}
	r.Messages = json.RawMessage(p.data[start:p.pos:p.pos])
	p.check(fieldMessages, allObjects)
	return true
}

// part reads one part of a message's content.
func (p *parser) part(message, index int) bool {
	if p.peek() != '{' {
		return p.value(maxDepth - 4)
	}
	start := p.pos
	kind := KindOther
	var typ, content, uuid []byte
	if !p.object(maxDepth-4, func(key []byte) bool {
		from := p.pos
		if !p.value(maxDepth - 5) {
			return false
		}
		v := p.data[from:p.pos]
		switch string(key) {
		case `"type"`:
			typ = v
		case `"uuid"`:
			uuid = v
		case `"image_url"`, `"image_embeds"`, `"image_pil"`, `"image"`:
			kind, content = KindImage, v
		case `"audio_url"`, `"input_audio"`, `"audio_embeds"`:
			kind, content = KindAudio, v
		case `"video_url"`:
			kind, content = KindVideo, v
		}
		return true
	}) {
		return false
	}
	switch string(typ) {
	case `"text"`, `"input_text"`, `"output_text"`, `"refusal"`, `"thinking"`:
		return true
	case "", "null":
		if content == nil {
			return true // {"text": …} without a type; or what the engine will refuse.
		}
	}
	if content == nil {
		content = p.data[start:p.pos]
	}
	p.req.Images = append(p.req.Images, Image{Message: message, Part: index, Kind: kind, Digest: p.digest(kind, content, uuid)})
	return true
}

// digest hashes a part's content: of an object its url or data, of anything else all of it.
func (p *parser) digest(kind Kind, content, uuid []byte) uint64 {
	if content[0] == '{' {
		if v := p.member(content, "url"); v != nil {
			content = v
		} else if v := p.member(content, "data"); v != nil {
			content = v
		}
	}
	var b [17]byte
	b[0] = byte(kind)
	binary.LittleEndian.PutUint64(b[1:], xxhash.Sum64(content))
	if uuid != nil && uuid[0] != 'n' {
		binary.LittleEndian.PutUint64(b[9:], xxhash.Sum64(uuid))
	}
	return xxhash.Sum64(b[:])
}

// prompt reads the prompt of a completion: a string, token ids, or an array of either.
func (p *parser) prompt() bool {
	r := p.req
	r.Prompts = nil
	start := p.pos
	switch p.peek() {
	case '"':
		if !p.str() {
			return false
		}
		r.Prompts = []Prompt{{Text: unquote(p.data[start:p.pos])}}
		p.check(fieldPrompt, true)
		return true
	case 'n':
		p.check(fieldPrompt, true)
		return p.value(maxDepth - 1)
	case '[':
	default:
		p.check(fieldPrompt, false)
		return p.value(maxDepth - 1)
	}
	var (
		flat []uint32 // The array itself is a prompt of token ids.
		ok   = true   // No element of a wrong type so far.
		kind byte     // What the elements are: '"', '[' or '0'.
	)
	if !p.array(maxDepth-1, func(int) bool {
		from := p.pos
		c := p.peek()
		if c-'0' <= 9 {
			c = '0'
		}
		if kind == 0 {
			kind = c
		}
		if c != kind {
			ok = false
		}
		switch c {
		case '"':
			if !p.str() {
				return false
			}
			if ok {
				r.Prompts = append(r.Prompts, Prompt{Text: unquote(p.data[from:p.pos])})
			}
			return true
		case '0':
			return p.token(&flat, &ok)
		case '[':
			ids := []uint32{}
			if !p.array(maxDepth-2, func(int) bool {
				if p.peek()-'0' > 9 {
					ok = false
					return p.value(maxDepth - 3)
				}
				return p.token(&ids, &ok)
			}) {
				return false
			}
			r.Prompts = append(r.Prompts, Prompt{Tokens: ids})
			return true
		}
		ok = false
		return p.value(maxDepth - 2)
	}) {
		return false
	}
	if kind == '0' {
		r.Prompts = []Prompt{{Tokens: flat}}
	}
	if !ok {
		r.Prompts = nil
	}
	p.check(fieldPrompt, ok)
	return true
}

// token reads a number and appends it to ids; ok becomes false if it is no token id.
func (p *parser) token(ids *[]uint32, ok *bool) bool {
	start := p.pos
	if !p.number() {
		return false
	}
	var n uint64
	for _, c := range p.data[start:p.pos] {
		if c-'0' > 9 || n > math.MaxUint32 {
			*ok = false
			return true
		}
		n = n*10 + uint64(c-'0')
	}
	if n > math.MaxUint32 {
		*ok = false
		return true
	}
	*ids = append(*ids, uint32(n))
	return true
}

// present returns v, nil if it is null.
func present(v json.RawMessage) json.RawMessage {
	if v[0] == 'n' {
		return nil
	}
	return v
}

// text decodes a string; anything else is empty.
func text(v []byte) string {
	if len(v) == 0 || v[0] != '"' {
		return ""
	}
	return unquote(v)
}

// member returns the last value of an object's member; nil if obj is no object or has no such member. obj must be valid
// and name a key that needs no escape.
func (p *parser) member(obj []byte, name string) []byte {
	if len(obj) == 0 || obj[0] != '{' {
		return nil
	}
	s := scanner{data: obj, compact: p.compact}
	var found []byte
	s.object(maxDepth, func(key []byte) bool {
		start := s.pos
		if !s.value(maxDepth) {
			return false
		}
		if k := key[1 : len(key)-1]; string(k) == name || !isPlain(k) && unquote(key) == name {
			found = obj[start:s.pos]
		}
		return true
	})
	return found
}

func (p *parser) boolean(f fieldID, v []byte) *bool {
	b, ok := laxBool(v)
	p.check(f, ok)
	return b
}

// laxBool reads a bool as the engine's validation does, which takes 1, "true", "on" and their like too. It returns nil for
// null or nothing, and false if v is no bool.
func laxBool(v []byte) (*bool, bool) {
	if len(v) == 0 || v[0] == 'n' {
		return nil, true
	}
	word := string(v)
	if v[0] == '"' {
		word = strings.ToLower(unquote(v))
	}
	switch word {
	case "true", "1":
		return new(true), true
	case "false", "0":
		return new(false), true
	}
	if v[0] == '"' {
		switch word {
		case "on", "t", "y", "yes":
			return new(true), true
		case "off", "f", "n", "no":
			return new(false), true
		}
		return nil, false
	}
	if f, err := strconv.ParseFloat(word, 64); err == nil && (f == 0 || f == 1) {
		return new(f == 1), true
	}
	return nil, false
}

// laxInt reads an int as the engine's validation does, which takes 5.0 and "5" too. It returns nil for null, and false if
// v is no int.
func laxInt(v []byte) (*int, bool) {
	if v[0] == 'n' {
		return nil, true
	}
	word := string(v)
	if v[0] == '"' {
		word = strings.TrimSpace(unquote(v))
	}
	if n, err := strconv.Atoi(word); err == nil {
		return new(n), true
	}
	// The bound keeps the conversion exact.
	if f, err := strconv.ParseFloat(word, 64); err == nil && f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return new(int(f)), true
	}
	return nil, false
}
