package openai

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"unicode/utf8"
)

// maxDepth bounds the nesting of a body. Python's parser, which the engine uses, gives up at about the same depth, and no
// request that means something comes near it.
const maxDepth = 1000

// scanner walks over JSON text and finds the ends of its values without building any. It takes what Python's json.loads
// takes: besides RFC 8259 that is NaN, Infinity and -Infinity. Invalid UTF-8 must have been refused before.
//
// Every method that reads starts at pos and leaves it behind what was read; on failure fail holds the reason and pos the
// place. The zero value with data set is ready.
type scanner struct {
	data []byte
	pos  int
	fail string
	// surrogate and nonFinite tell that an escaped surrogate without partner, or NaN or an infinity, was passed.
	surrogate, nonFinite bool

	// compact says that data holds no control character at all, which is how almost every client writes JSON; then search
	// may be used. nextQuote and nextSlash are its memory.
	compact              bool
	nextQuote, nextSlash int
}

// survey looks at the whole of d once: whether it is ASCII, and whether it holds control characters.
func survey(d []byte) (ascii, compact bool) {
	var high, low uint64
	for len(d) >= 32 {
		a, b := binary.LittleEndian.Uint64(d), binary.LittleEndian.Uint64(d[8:])
		c, e := binary.LittleEndian.Uint64(d[16:]), binary.LittleEndian.Uint64(d[24:])
		high |= a | b | c | e
		low |= (a-ones*0x20)&^a | (b-ones*0x20)&^b | (c-ones*0x20)&^c | (e-ones*0x20)&^e
		d = d[32:]
	}
	// Borrows may mark a byte that is none, but only above one that is.
	ascii, compact = high&highs == 0, low&highs == 0
	for _, c := range d {
		ascii = ascii && c < 0x80
		compact = compact && c >= 0x20
	}
	return ascii, compact
}

// ones and highs are a word's lowest and highest bits of each byte.
const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

const (
	failEnd     = "it ends too early"
	failSyntax  = "unexpected character"
	failControl = "a control character inside a string must be escaped"
	failEscape  = "invalid escape inside a string"
	failNumber  = "malformed number"
	failDepth   = "it is nested too deeply"
	failTrail   = "something follows the JSON value"
	failUTF8    = "it is not valid UTF-8"
)

func (s *scanner) bad(reason string) bool {
	s.fail = reason
	return false
}

// badHere fails with failEnd at the end of the data, else with reason.
func (s *scanner) badHere(reason string) bool {
	if s.pos >= len(s.data) {
		return s.bad(failEnd)
	}
	return s.bad(reason)
}

// space skips white space.
func (s *scanner) space() {
	for s.pos < len(s.data) {
		switch s.data[s.pos] {
		case ' ', '\n', '\t', '\r':
			s.pos++
		default:
			return
		}
	}
}

// peek returns the next byte, 0 at the end. A 0 in the data is no valid JSON either.
func (s *scanner) peek() byte {
	if s.pos < len(s.data) {
		return s.data[s.pos]
	}
	return 0
}

// value skips one value. depth is how many more levels it may nest.
func (s *scanner) value(depth int) bool {
	switch c := s.peek(); c {
	case '"':
		return s.str()
	case '{':
		return s.object(depth, nil)
	case '[':
		return s.array(depth, nil)
	case 't':
		return s.literal("true")
	case 'f':
		return s.literal("false")
	case 'n':
		return s.literal("null")
	case 'N':
		s.nonFinite = true
		return s.literal("NaN")
	case 'I':
		s.nonFinite = true
		return s.literal("Infinity")
	default:
		if c == '-' || c-'0' <= 9 {
			return s.number()
		}
		return s.badHere(failSyntax)
	}
}

// object skips an object. If field is not nil it is called for each member, with pos at the value, and must read it.
func (s *scanner) object(depth int, field func(key []byte) bool) bool {
	if depth == 0 {
		return s.bad(failDepth)
	}
	s.pos++ // '{'
	s.space()
	if s.peek() == '}' {
		s.pos++
		return true
	}
	for {
		if s.peek() != '"' {
			return s.badHere(failSyntax)
		}
		start := s.pos
		if !s.str() {
			return false
		}
		key := s.data[start:s.pos]
		s.space()
		if s.peek() != ':' {
			return s.badHere(failSyntax)
		}
		s.pos++
		s.space()
		if field == nil {
			if !s.value(depth - 1) {
				return false
			}
		} else if !field(key) {
			return false
		}
		s.space()
		switch s.peek() {
		case ',':
			s.pos++
			s.space()
		case '}':
			s.pos++
			return true
		default:
			return s.badHere(failSyntax)
		}
	}
}

// array skips an array. If element is not nil it is called for each element, with pos at it, and must read it.
func (s *scanner) array(depth int, element func(i int) bool) bool {
	if depth == 0 {
		return s.bad(failDepth)
	}
	s.pos++ // '['
	s.space()
	if s.peek() == ']' {
		s.pos++
		return true
	}
	for i := 0; ; i++ {
		if element == nil {
			if !s.value(depth - 1) {
				return false
			}
		} else if !element(i) {
			return false
		}
		s.space()
		switch s.peek() {
		case ',':
			s.pos++
			s.space()
		case ']':
			s.pos++
			return true
		default:
			return s.badHere(failSyntax)
		}
	}
}

// str skips a string. Almost all bytes of a request are inside strings, so this is what its cost depends on: eight bytes at
// a time while something may come soon, and by the machine's fastest search once nothing came for a while.
func (s *scanner) str() bool {
	d := s.data
	p := s.pos + 1
	for {
		long := p + longRun
		for p+8 <= len(d) {
			x := binary.LittleEndian.Uint64(d[p:])
			q := x ^ ones*'"'
			b := x ^ ones*'\\'
			// A byte's high bit is set where it is below 0x20, a quote or a backslash. A borrow may set one too many, but
			// only above one that is right, and the lowest is all that is used.
			if m := ((x-ones*0x20)&^x | (q-ones)&^q | (b-ones)&^b) & highs; m != 0 {
				p += bits.TrailingZeros64(m) / 8
				break
			}
			if p += 8; p >= long && s.compact {
				p = s.search(p)
				break
			}
		}
		if p >= len(d) {
			s.pos = len(d)
			return s.bad(failEnd)
		}
		switch c := d[p]; {
		case c == '"':
			s.pos = p + 1
			return true
		case c == '\\':
			// Line breaks and quotes are every few dozen bytes in code; keep them in this loop.
			if p+1 < len(d) && simpleEscape[d[p+1]] {
				p += 2
				continue
			}
			s.pos = p
			if !s.escape() {
				return false
			}
			p = s.pos
		case c < 0x20:
			s.pos = p
			return s.bad(failControl)
		default:
			p++ // The last few bytes of the data.
		}
	}
}

// longRun is after how many bytes without a quote or backslash str calls search.
const longRun = 64

// search returns where the next quote or backslash is, the end if there is none. Both places are kept until they are
// passed, so that nothing is searched twice.
func (s *scanner) search(p int) int {
	next := func(known int, c byte) int {
		if known >= p {
			return known
		}
		if i := bytes.IndexByte(s.data[p:], c); i >= 0 {
			return p + i
		}
		return len(s.data)
	}
	s.nextQuote, s.nextSlash = next(s.nextQuote, '"'), next(s.nextSlash, '\\')
	return min(s.nextQuote, s.nextSlash)
}

// simpleEscape has the characters that may follow a backslash alone.
var simpleEscape = [256]bool{'"': true, '\\': true, '/': true, 'b': true, 'f': true, 'n': true, 'r': true, 't': true}

// escape skips one escape sequence, two if they are a surrogate pair.
func (s *scanner) escape() bool {
	if s.pos+1 >= len(s.data) {
		s.pos = len(s.data)
		return s.bad(failEnd)
	}
	if c := s.data[s.pos+1]; c != 'u' {
		if !simpleEscape[c] {
			return s.bad(failEscape)
		}
		s.pos += 2
		return true
	}
	u, ok := hex4(s.data, s.pos+2)
	if !ok {
		if s.pos+6 > len(s.data) {
			s.pos = len(s.data)
			return s.bad(failEnd)
		}
		return s.bad(failEscape)
	}
	s.pos += 6
	if u&0xf800 != 0xd800 {
		return true
	}
	if u < 0xdc00 && s.pos+6 <= len(s.data) && s.data[s.pos] == '\\' && s.data[s.pos+1] == 'u' {
		if low, ok := hex4(s.data, s.pos+2); ok && low&0xfc00 == 0xdc00 {
			s.pos += 6
			return true
		}
	}
	s.surrogate = true
	return true
}

// hex4 reads four hexadecimal digits at d[at:].
func hex4(d []byte, at int) (rune, bool) {
	if at+4 > len(d) {
		return 0, false
	}
	var u rune
	for _, c := range d[at : at+4] {
		switch {
		case c-'0' <= 9:
			u = u<<4 | rune(c-'0')
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			u = u<<4 | rune(c|0x20-'a'+10)
		default:
			return 0, false
		}
	}
	return u, true
}

func (s *scanner) literal(word string) bool {
	for i := range len(word) {
		if s.peek() != word[i] {
			return s.badHere(failSyntax)
		}
		s.pos++
	}
	return true
}

func (s *scanner) digits() bool {
	start := s.pos
	for s.pos < len(s.data) && s.data[s.pos]-'0' <= 9 {
		s.pos++
	}
	return s.pos > start
}

func (s *scanner) number() bool {
	if s.peek() == '-' {
		s.pos++
		if s.peek() == 'I' {
			s.nonFinite = true
			return s.literal("Infinity")
		}
	}
	if s.peek() == '0' {
		s.pos++
	} else if !s.digits() {
		return s.badHere(failNumber)
	}
	if s.peek() == '.' {
		s.pos++
		if !s.digits() {
			return s.badHere(failNumber)
		}
	}
	if s.peek()|0x20 == 'e' {
		s.pos++
		if c := s.peek(); c == '+' || c == '-' {
			s.pos++
		}
		if !s.digits() {
			return s.badHere(failNumber)
		}
	}
	return true
}

// isPlain says whether a string's raw bytes stand for themselves.
func isPlain(raw []byte) bool { return bytes.IndexByte(raw, '\\') < 0 }

// unquote decodes a string that str has passed, quotes included, as json.loads does. A surrogate without partner becomes
// U+FFFD.
func unquote(raw []byte) string {
	raw = raw[1 : len(raw)-1]
	if isPlain(raw) {
		return string(raw)
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		c := raw[i]
		if c != '\\' {
			// Runs between escapes are long; copy them whole.
			j := i + 1
			for j < len(raw) && raw[j] != '\\' {
				j++
			}
			out = append(out, raw[i:j]...)
			i = j
			continue
		}
		switch c := raw[i+1]; c {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			u, _ := hex4(raw, i+2)
			i += 6
			if u&0xfc00 == 0xd800 && i+6 <= len(raw) && raw[i] == '\\' && raw[i+1] == 'u' {
				if low, ok := hex4(raw, i+2); ok && low&0xfc00 == 0xdc00 {
					u = 0x10000 + (u-0xd800)<<10 + (low - 0xdc00)
					i += 6
				}
			}
			out = utf8.AppendRune(out, u) // Writes U+FFFD for a surrogate.
			continue
		default:
			out = append(out, c)
		}
		i += 2
	}
	return string(out)
}
