package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"
)

// cutKind is a kind of place at which a text can be encoded in parts: the ids of the whole are those of the left part followed
// by those of the right part. Each kind is proved for a tokenizer when it is loaded, and is off where the proof fails:
//
//   - special: before a special token. Encoders split a text at special tokens first and treat what lies between by itself, so
//     all it takes is that no other token can swallow the beginning of this one.
//   - newline: after a line end that a letter follows.
//   - space: before a space that has a letter, comma or full stop on its left and a letter on its right.
//   - cjk: before an ideographic comma or full stop that has an ideograph or kana on both sides.
//
// For the last three the proof has two parts. No entry of the vocabulary and no added token contains such a place: then no
// merge crosses it. And the built-in corpus, cut at every such place, gives the same ids as uncut: then the rules of the
// normalizer and the pre-tokenizer, which look a character or two around them, do not reach across it either. The left part is
// encoded together with the two characters after it, whose own ids are then taken off, so that such rules see what they
// would see in the whole.
type cutKind string

// The kinds of cuts.
const (
	cutSpecial cutKind = "special"
	cutNewline cutKind = "newline"
	cutSpace   cutKind = "space"
	cutCJK     cutKind = "cjk"
)

var allCutKinds = [...]cutKind{cutSpecial, cutNewline, cutSpace, cutCJK}

// Sizes of chunks in bytes. A chunk has at least minChunk bytes and ends at the best place of the window up to maxChunk; where
// the window has none, at the first one after it. Smaller chunks cost more lookups, larger ones more encoding around what is
// new.
const (
	minChunk = 768
	maxChunk = 2048
)

// cutRules are the kinds of cuts that are exact for a tokenizer. They are read-only once made.
type cutRules struct {
	special             specialSet
	newline, space, cjk bool
}

// has says whether a kind is in use.
func (r *cutRules) has(kind cutKind) bool {
	switch kind {
	case cutSpecial:
		return len(r.special.tokens) > 0
	case cutNewline:
		return r.newline
	case cutSpace:
		return r.space
	case cutCJK:
		return r.cjk
	}
	return false
}

// kinds lists the kinds in use.
func (r *cutRules) kinds() []cutKind {
	kinds := []cutKind{}
	for _, k := range allCutKinds {
		if r.has(k) {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

// only returns the rules with one kind left.
func (r *cutRules) only(kind cutKind) *cutRules {
	one := new(cutRules)
	switch kind {
	case cutSpecial:
		one.special = r.special
	case cutNewline:
		one.newline = r.newline
	case cutSpace:
		one.space = r.space
	case cutCJK:
		one.cjk = r.cjk
	}
	return one
}

// drop switches a kind off.
func (r *cutRules) drop(kind cutKind) {
	switch kind {
	case cutSpecial:
		r.special = specialSet{}
	case cutNewline:
		r.newline = false
	case cutSpace:
		r.space = false
	case cutCJK:
		r.cjk = false
	}
}

// next returns the end of the chunk of text that begins at start, and how many bytes after it are to be encoded with it. It
// reads only the window it chooses from, and its choice depends only on what stands there: the same stretch of text is cut
// alike wherever it appears, once two cuts have fallen on the same place.
func (r *cutRules) next(text string, start int) (end, ahead int) {
	if len(text)-start <= maxChunk {
		return len(text), 0
	}
	from := start + minChunk
	for to := start + maxChunk; from < len(text); from, to = to, to+maxChunk {
		to = min(to, len(text))
		if p := r.special.find(text, from, to); p >= 0 {
			return p, 0
		}
		p := -1
		if r.newline {
			p = bestNewline(text, from, to)
		}
		if p < 0 && r.space {
			p = bestSpace(text, from, to)
		}
		if p < 0 && r.cjk {
			p = bestCJK(text, from, to)
		}
		if p >= 0 {
			return p, lookAhead(text, p)
		}
	}
	return len(text), 0
}

// at says whether p is a place for a cut, and how many bytes after it the left part needs. Proofs and tests use it; next
// finds the same places faster.
func (r *cutRules) at(text string, p int) (ahead int, ok bool) {
	switch {
	case p <= 0 || p >= len(text):
		return 0, false
	case r.special.at(text, p):
		return 0, true
	case r.newline && newlineCut(text, p), r.space && spaceCut(text, p), r.cjk && cjkCut(text, p):
		return lookAhead(text, p), true
	}
	return 0, false
}

// lookAhead returns the bytes of the two characters at p, or of what is left.
func lookAhead(text string, p int) int {
	_, n := utf8.DecodeRuneInString(text[p:])
	_, m := utf8.DecodeRuneInString(text[p+n:])
	return n + m
}

// newlineCut says whether a cut of the kind newline may be at p.
func newlineCut(text string, p int) bool {
	return text[p-1] == '\n' && letterAt(text, p)
}

// spaceCut says whether a cut of the kind space may be at p.
func spaceCut(text string, p int) bool {
	return text[p] == ' ' && letterAt(text, p+1) && leftOfSpace(text, p)
}

func leftOfSpace(text string, p int) bool {
	switch b := text[p-1]; {
	case b == ',' || b == '.':
		return true
	case b < utf8.RuneSelf:
		return asciiLetter(b)
	}
	r, _ := utf8.DecodeLastRuneInString(text[:p])
	return letter(r)
}

// cjkCut says whether a cut of the kind cjk may be at p.
func cjkCut(text string, p int) bool {
	if !strings.HasPrefix(text[p:], "，") && !strings.HasPrefix(text[p:], "。") && !strings.HasPrefix(text[p:], "、") {
		return false
	}
	before, _ := utf8.DecodeLastRuneInString(text[:p])
	after, _ := utf8.DecodeRuneInString(text[p+3:])
	return ideographic(before) && ideographic(after)
}

func asciiLetter(b byte) bool {
	return b|0x20 >= 'a' && b|0x20 <= 'z'
}

// letterAt says whether a letter in the sense of letter begins at p.
func letterAt(text string, p int) bool {
	if p >= len(text) {
		return false
	}
	if b := text[p]; b < utf8.RuneSelf {
		return asciiLetter(b)
	}
	r, _ := utf8.DecodeRuneInString(text[p:])
	return letter(r)
}

// letter says whether r is a letter beside which a cut may be: those that begin a word in every tokenizer's rules and compose
// with nothing before them.
func letter(r rune) bool {
	switch {
	case r < utf8.RuneSelf:
		return asciiLetter(byte(r))
	case r <= 0x024f:
		return r >= 0xc0 && r != 0xd7 && r != 0xf7
	case r <= 0x04ff: // Greek, Cyrillic
		return r >= 0x0391 && r <= 0x03a9 || r >= 0x03b1 && r <= 0x03c9 || r >= 0x0400 && r <= 0x0481
	case r <= 0x06ff: // Hebrew, Arabic
		return r >= 0x05d0 && r <= 0x05ea || r >= 0x0621 && r <= 0x063a || r >= 0x0641 && r <= 0x064a
	case r <= 0x0939: // Devanagari
		return r >= 0x0904
	case r >= 0xac00: // Hangul
		return r <= 0xd7a3
	}
	return ideographic(r)
}

// ideographic says whether r is a common ideograph or a kana letter.
func ideographic(r rune) bool {
	return r >= 0x4e00 && r <= 0x9fa5 || r >= 0x3041 && r <= 0x3096 || r >= 0x30a1 && r <= 0x30fa
}

// weigh gives the place p a weight that depends on the eight bytes after it alone. The place of least weight in a window is
// the one that windows beginning elsewhere choose as well, if they reach it.
func weigh(text string, p int) uint64 {
	if p+8 > len(text) {
		return 1 << 63
	}
	s := text[p : p+8]
	v := uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
	v *= 0x9e3779b97f4a7c15
	return v ^ v>>32
}

// bestNewline returns the best cut of the kind newline in text[from:to], or -1.
func bestNewline(text string, from, to int) int {
	best, least := -1, uint64(0)
	for p := from; ; {
		i := strings.IndexByte(text[p-1:to-1], '\n')
		if i < 0 {
			return best
		}
		p += i
		if letterAt(text, p) {
			if w := weigh(text, p); best < 0 || w < least {
				best, least = p, w
			}
		}
		if p++; p >= to {
			return best
		}
	}
}

// bestSpace returns the best cut of the kind space in text[from:to], or -1: after a full stop if there is one, else after a
// comma, else one of the first few between letters.
func bestSpace(text string, from, to int) int {
	for _, mark := range [...]byte{'.', ','} {
		best, least := -1, uint64(0)
		for p := from; p < to; {
			i := strings.IndexByte(text[p-1:to-1], mark)
			if i < 0 {
				break
			}
			p += i
			if text[p] == ' ' && letterAt(text, p+1) {
				if w := weigh(text, p); best < 0 || w < least {
					best, least = p, w
				}
			}
			p++
		}
		if best >= 0 {
			return best
		}
	}
	best, least := -1, uint64(0)
	for p, seen := from, 0; p < to && seen < 64; {
		i := strings.IndexByte(text[p:to], ' ')
		if i < 0 {
			break
		}
		p += i
		if letterAt(text, p+1) && leftOfSpace(text, p) {
			if w := weigh(text, p); best < 0 || w < least {
				best, least = p, w
			}
			seen++
		}
		p++
	}
	return best
}

// bestCJK returns the best cut of the kind cjk in text[from:to], or -1.
func bestCJK(text string, from, to int) int {
	for _, mark := range [...]string{"。", "，", "、"} {
		best, least := -1, uint64(0)
		for p := from; p < to; {
			i := strings.Index(text[p:to], mark)
			if i < 0 {
				break
			}
			p += i
			if cjkCut(text, p) {
				if w := weigh(text, p); best < 0 || w < least {
					best, least = p, w
				}
			}
			p += len(mark)
		}
		if best >= 0 {
			return best
		}
	}
	return -1
}

// specialSet are the special tokens before which a cut may be. All have the form <…> or […], without the closing bracket
// inside, so that a lookup in a map tells whether one begins at a bracket.
type specialSet struct {
	tokens        map[string]struct{}
	angle, square bool
	longest       int
}

// closing returns the bracket that closes open, or 0.
func closing(open byte) byte {
	switch open {
	case '<':
		return '>'
	case '[':
		return ']'
	}
	return 0
}

func (s *specialSet) add(token string) {
	if s.tokens == nil {
		s.tokens = map[string]struct{}{}
	}
	s.tokens[token] = struct{}{}
	s.angle = s.angle || token[0] == '<'
	s.square = s.square || token[0] == '['
	s.longest = max(s.longest, len(token))
}

// at says whether one of the tokens begins at p.
func (s *specialSet) at(text string, p int) bool {
	closer := closing(text[p])
	if closer == 0 || len(s.tokens) == 0 {
		return false
	}
	end := strings.IndexByte(text[p:min(len(text), p+s.longest)], closer)
	if end < 0 {
		return false
	}
	_, ok := s.tokens[text[p:p+end+1]]
	return ok
}

// find returns the first place in text[from:to] where one of the tokens begins, or -1.
func (s *specialSet) find(text string, from, to int) int {
	first := -1
	if s.angle {
		first = s.findForm(text, from, to, '<')
	}
	if s.square {
		if first >= 0 {
			to = first
		}
		if p := s.findForm(text, from, to, '['); p >= 0 {
			first = p
		}
	}
	return first
}

func (s *specialSet) findForm(text string, from, to int, open byte) int {
	for p := from; p < to; p++ {
		i := strings.IndexByte(text[p:to], open)
		if i < 0 {
			return -1
		}
		p += i
		if s.at(text, p) {
			return p
		}
	}
	return -1
}

// specialTokens returns the tokens before which a cut is exact. A token is left out if it can begin inside another one, if it
// takes in spaces on its left or looks at its neighbors, or if a normalizer may change it before it is looked for.
func specialTokens(v *vocabulary, added []addedToken) specialSet {
	identity := len(v.Normalizer) == 0 || string(v.Normalizer) == "null" || emptyNormalizer(v.Normalizer)
	// What follows a bracket inside other tokens could be the beginning of a token here.
	var inner []string
	for _, t := range added {
		for i := 1; i < len(t.Content); i++ {
			if closing(t.Content[i]) != 0 {
				inner = append(inner, t.Content[i:])
			}
		}
	}
	var set specialSet
	for _, t := range added {
		n := len(t.Content)
		if n < 3 || closing(t.Content[0]) == 0 || strings.IndexByte(t.Content, closing(t.Content[0])) != n-1 {
			continue
		}
		if t.LStrip || t.SingleWord || t.Normalized && !identity {
			continue
		}
		if slices.ContainsFunc(inner, func(in string) bool {
			return strings.HasPrefix(in, t.Content) || strings.HasPrefix(t.Content, in)
		}) {
			continue
		}
		set.add(t.Content)
	}
	return set
}

// emptyNormalizer says whether a normalizer is a sequence of none.
func emptyNormalizer(raw json.RawMessage) bool {
	var n struct {
		Type        string            `json:"type"`
		Normalizers []json.RawMessage `json:"normalizers"`
	}
	return json.Unmarshal(raw, &n) == nil && n.Type == "Sequence" && len(n.Normalizers) == 0
}

// spans says which kinds of cuts (newline, space, cjk) have a place inside an entry of the vocabulary. An entry may begin or
// end within a character; what is not known counts as if it were what the cut needs.
func spans(entry string) (newline, space, cjk bool) {
	for i := 1; i < len(entry); i++ {
		switch {
		case entry[i-1] == '\n' && maybeLetterAt(entry, i):
			newline = true
		case entry[i] == ' ' && maybeLeft(entry[:i]) && (i+1 == len(entry) || maybeLetterAt(entry, i+1)):
			space = true
		case entry[i] == 0xe3 || entry[i] == 0xef: // the first bytes of the three marks
			if mark := entry[i:min(len(entry), i+3)]; maybeMark(mark) && maybeIdeographBefore(entry[:i]) {
				cjk = true
			}
		}
	}
	return newline, space, cjk
}

// maybeLetterAt is letterAt for a text that may end within a character.
func maybeLetterAt(s string, p int) bool {
	if s[p] < utf8.RuneSelf {
		return asciiLetter(s[p])
	}
	r, n := utf8.DecodeRuneInString(s[p:])
	return r == utf8.RuneError && n <= 1 || letter(r)
}

// maybeLeft is leftOfSpace for a text that may begin within a character.
func maybeLeft(s string) bool {
	b := s[len(s)-1]
	if b < utf8.RuneSelf {
		return b == ',' || b == '.' || asciiLetter(b)
	}
	r, n := utf8.DecodeLastRuneInString(s)
	return r == utf8.RuneError && n <= 1 || letter(r)
}

func maybeMark(s string) bool {
	return strings.HasPrefix("，", s) || strings.HasPrefix("。", s) || strings.HasPrefix("、", s)
}

func maybeIdeographBefore(s string) bool {
	if s[len(s)-1] < utf8.RuneSelf {
		return false
	}
	r, n := utf8.DecodeLastRuneInString(s)
	return r == utf8.RuneError && n <= 1 || ideographic(r)
}

// proofTexts is how many fuzzed texts each kind of cut must hold on when a model is loaded.
const proofTexts = 500

// proveCuts finds the kinds of cuts that are exact for the tokenizer. why says, for each kind that is off, what stands
// against it.
func proveCuts(e *encoder, v *vocabulary, added []addedToken) (rules *cutRules, why map[cutKind]error, err error) {
	rules = &cutRules{special: specialTokens(v, added), newline: true, space: true, cjk: true}
	why = map[cutKind]error{}
	off := func(kind cutKind, reason error) {
		rules.drop(kind)
		if why[kind] == nil {
			why[kind] = reason
		}
	}
	if !rules.has(cutSpecial) {
		why[cutSpecial] = errors.New("the tokenizer has no special token before which a cut is exact")
	}
	scan := func(text string) bool {
		newline, space, cjk := spans(text)
		if newline {
			off(cutNewline, errSpans)
		}
		if space {
			off(cutSpace, errSpans)
		}
		if cjk {
			off(cutCJK, errSpans)
		}
		return rules.newline || rules.space || rules.cjk
	}
	if err := v.entries(scan); err != nil {
		return nil, nil, err
	}
	for _, t := range added {
		if t.Content == "" {
			continue
		}
		scan(t.Content)
		last, _ := utf8.DecodeLastRuneInString(t.Content)
		if t.RStrip && (letter(last) || last == ',' || last == '.') {
			off(cutSpace, errStrips)
		}
		if first, _ := utf8.DecodeRuneInString(t.Content); t.LStrip && letter(first) {
			off(cutNewline, errStrips)
		}
	}
	if v.Model.Type == "Unigram" || v.Model.FuseUnknown && !v.Model.ByteFallback && !v.byteLevel() {
		// Unigram weighs whole words at once, and unknown characters that are fused are one token across any place.
		for _, kind := range [...]cutKind{cutNewline, cutSpace, cutCJK} {
			off(kind, fmt.Errorf("a model of type %s has no borders inside a text", v.Model.Type))
		}
	}
	texts := proofCorpus(rules)
	for _, kind := range allCutKinds {
		if !rules.has(kind) {
			continue
		}
		switch err := sameCut(e, rules.only(kind), texts); {
		case errors.Is(err, errCutDiffers):
			off(kind, err)
		case err != nil:
			return nil, nil, err
		}
	}
	if err := sameCut(e, rules, texts); err != nil {
		return nil, nil, fmt.Errorf("kinds of cuts that are exact each by itself are not together: %w", err)
	}
	return rules, why, nil
}

// Reasons why a kind of cut is off.
var (
	errSpans      = errors.New("an entry of the vocabulary spans such places")
	errStrips     = errors.New("an added token takes in white space at such places")
	errCutDiffers = errors.New("the built-in corpus cut there has other ids than uncut")
)

// proofCorpus returns texts rich in places for cuts: the built-in corpus, and fuzzed words around every kind of place.
func proofCorpus(rules *cutRules) []string {
	special := make([]string, 0, len(rules.special.tokens))
	for token := range rules.special.tokens {
		special = append(special, token)
	}
	slices.Sort(special)
	texts := corpus(special, proofTexts/2)
	rng := rand.New(rand.NewPCG(20240318, 2)) //nolint:gosec // a fixed seed is the point
	joints := [...]string{" ", " ", " ", "\n", "\n", "\n\n", ", ", ". ", " \n", "\t\n", "\r\n", "\n\n\n", ".\n", ",\n", "，", "。", "、", "! ", "'s ", "'t\n", "1\n", "1 "}
	for range proofTexts / 2 {
		var b strings.Builder
		for range 3 + rng.IntN(20) {
			b.WriteString(fuzzAlphabet[rng.IntN(len(fuzzAlphabet))])
			b.WriteString(joints[rng.IntN(len(joints))])
			if len(special) > 0 && rng.IntN(15) == 0 {
				b.WriteString(special[rng.IntN(len(special))])
			}
		}
		texts = append(texts, b.String())
	}
	return texts
}

// sameCut returns an error unless each text, cut at every place that the rules allow, gives the ids of the whole.
func sameCut(e *encoder, rules *cutRules, texts []string) error {
	var whole, parts []uint32
	for i, text := range texts {
		var err error
		if whole, err = e.encode(whole[:0], text, false); err != nil {
			return fmt.Errorf("encode text %d of the corpus: %w", i, err)
		}
		if parts, err = encodeCut(e, parts[:0], text, rules, func(int) bool { return true }); err != nil {
			return fmt.Errorf("text %d of the corpus: %w", i, err)
		}
		if !slices.Equal(whole, parts) {
			return fmt.Errorf("text %d of the corpus: %w", i, errCutDiffers)
		}
	}
	return nil
}

// encodeCut appends the ids of text, encoded in parts that end at those places of the rules that take accepts.
func encodeCut(e engine, dst []uint32, text string, rules *cutRules, take func(p int) bool) ([]uint32, error) {
	start := 0
	for p := 1; p <= len(text); p++ {
		ahead, ok := rules.at(text, p)
		if p < len(text) && (!ok || !take(p)) {
			continue
		}
		part, err := encodeChunk(e, text[start:p+ahead], ahead)
		if err != nil {
			return dst, err
		}
		dst = append(dst, part...)
		start = p
	}
	return dst, nil
}

// encodeChunk returns the ids of text less its last ahead bytes, which stand for what follows.
func encodeChunk(e engine, text string, ahead int) ([]uint32, error) {
	var counts [2]uintptr
	all := uintptr(len(text))
	pair := [2]span{{0, all}, {all - uintptr(ahead), all}}
	use := pair[:1]
	if ahead > 0 {
		use = pair[:]
	}
	ids, err := e.encodeSpans(nil, text, use, false, counts[:])
	if err != nil {
		return nil, err
	}
	return chunkIDs(ids, int(counts[0]), int(counts[1]))
}

// chunkIDs takes the look-ahead's ids off. ids are those of the chunk with its look-ahead, then those of the look-ahead alone.
func chunkIDs(ids []uint32, with, ahead int) ([]uint32, error) {
	if ahead > with || !slices.Equal(ids[with-ahead:with], ids[with:with+ahead]) {
		return nil, errCutDiffers
	}
	return ids[:with-ahead], nil
}
