package simhttp

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"prefixgate/internal/openai"
	"prefixgate/internal/tokenize"

	"github.com/cespare/xxhash/v2"
)

// Tokenizer turns requests into token ids. It is called concurrently. Implemented by *tokenize.Model.
type Tokenizer interface {
	Encode(ctx context.Context, req *openai.Request) (tokenize.Encoded, error)
}

var _ Tokenizer = (*tokenize.Model)(nil)

// words is what answers are made of: common, so that most tokenizers have a token for each.
const words = `the of and to in is that it was for on are as with they at be this from have or by one had not but what all were
when we there can an your which their if do will each about how up out them then she many some so these would other into has more
her two like him see time could no make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know get through back much before go good new write our used me man too any day same
right look think also around another came come work three word must because does part even place well such here take why things
help put years different away again off went old number great tell men say small every found still between name should home big give
air line set own under read last never us left end along while might next sound below saw something thought both few those always
looked show large often together asked house world going want school important until form food keep children feet land side without
boy once animals life enough took sometimes four head above kind began almost live page got earth need far hand high year mother
light parts country father let night following picture being study second eyes soon times story boys since white days ever paper hard
near sentence better best across during today others however sure means knew try told young miles sun ways thing whole hear example
heard several change answer room sea against top turned learn point city play toward five using himself usually`

// unit is a piece of text that becomes the same tokens wherever it stands in an answer.
type unit struct {
	text string
	ids  []uint32
}

// lexicon writes answers: text of which it knows the tokens without a decoder, and which becomes the same tokens again when a
// client sends it back as part of its next prompt.
type lexicon struct {
	// first begin an answer, next follow within a sentence.
	first, next []unit
	stop        unit
	// starts begin a later sentence.
	starts []unit
}

// encodeText returns the ids of a plain text, without the tokens that a tokenizer puts around a prompt.
func encodeText(ctx context.Context, t Tokenizer, text string) ([]uint32, error) {
	no := false
	enc, err := t.Encode(ctx, &openai.Request{Endpoint: openai.Completions, Prompts: []openai.Prompt{{Text: text}}, AddSpecialTokens: &no, N: 1})
	if err != nil {
		return nil, err
	}
	if len(enc.Prompts) != 1 {
		return nil, fmt.Errorf("encode a text: got %d prompts, want 1", len(enc.Prompts))
	}
	return enc.Prompts[0].IDs, nil
}

// newLexicon finds the tokens of the words and proves on a long text that they do not depend on their neighbors.
func newLexicon(ctx context.Context, t Tokenizer) (*lexicon, error) {
	lex := &lexicon{}
	const base = "The"
	baseIDs, err := encodeText(ctx, t, base)
	if err != nil {
		return nil, fmt.Errorf("encode a word: %w", err)
	}
	// after returns the ids of text where it follows a word.
	after := func(text string) (unit, error) {
		ids, err := encodeText(ctx, t, base+text)
		if err != nil {
			return unit{}, fmt.Errorf("encode a word: %w", err)
		}
		if len(ids) <= len(baseIDs) || !slices.Equal(ids[:len(baseIDs)], baseIDs) {
			return unit{}, nil // It merges with the word before it: of no use.
		}
		return unit{text, ids[len(baseIDs):]}, nil
	}
	if lex.stop, err = after("."); err != nil {
		return nil, err
	}
	for w := range strings.FieldsSeq(words) {
		upper := strings.ToUpper(w[:1]) + w[1:]
		ids, err := encodeText(ctx, t, upper)
		if err != nil {
			return nil, fmt.Errorf("encode a word: %w", err)
		}
		if len(ids) == 1 {
			lex.first = append(lex.first, unit{upper, ids})
		}
		for _, form := range []struct {
			text string
			list *[]unit
		}{{" " + w, &lex.next}, {" " + upper, &lex.starts}} {
			u, err := after(form.text)
			if err != nil {
				return nil, err
			}
			// Only whole words, so that an answer can end after any token.
			if len(u.ids) == 1 {
				*form.list = append(*form.list, u)
			}
		}
	}
	if len(lex.first) == 0 || len(lex.next) == 0 {
		return nil, fmt.Errorf("the tokenizer has no token for any of %d common words: answers cannot be written with it", len(strings.Fields(words)))
	}
	if len(lex.stop.ids) != 1 || len(lex.starts) == 0 {
		lex.stop = unit{}
	}
	for seed := range uint64(8) {
		a := lex.write(rand.New(rand.NewPCG(seed, 0)), 200)
		ids, err := encodeText(ctx, t, a.text)
		if err != nil {
			return nil, fmt.Errorf("encode an answer: %w", err)
		}
		if !slices.Equal(ids, a.ids) {
			return nil, fmt.Errorf("the tokenizer does not keep words apart: an answer of %d tokens became %d other ones", len(a.ids), len(ids))
		}
	}
	return lex, nil
}

// answer is a text with the tokens it consists of.
type answer struct {
	ids []uint32
	// ends[i] is where token i ends in text.
	ends []int
	text string
	// generated is how many tokens the engine generates: those of text, and one more if the model ended the answer itself.
	generated int
	// finish is the finish_reason; stopString the stop string that ended it, or empty.
	finish     string
	stopString string
}

// piece returns the text that token number i (from 0) adds; empty for the token that ends the answer.
func (a *answer) piece(i int) string {
	if i >= len(a.ends) {
		return ""
	}
	start := 0
	if i > 0 {
		start = a.ends[i-1]
	}
	return a.text[start:a.ends[i]]
}

// write makes up n tokens of text.
func (l *lexicon) write(rng *rand.Rand, n int) answer {
	a := answer{ids: make([]uint32, 0, n), ends: make([]int, 0, n)}
	var text strings.Builder
	words := 0 // in this sentence
	for len(a.ids) < n {
		var u unit
		switch {
		case len(a.ids) == 0:
			u = l.first[rng.IntN(len(l.first))]
		case words < 0:
			u = l.starts[rng.IntN(len(l.starts))]
			words = 0
		case words > 4 && l.stop.text != "" && rng.IntN(10) == 0:
			u = l.stop
			words = -2
		default:
			u = l.next[rng.IntN(len(l.next))]
		}
		words++
		text.WriteString(u.text)
		a.ids = append(a.ids, u.ids...)
		a.ends = append(a.ends, text.Len())
	}
	a.text = text.String()
	return a
}

// wish is what a request says about its answer.
type wish struct {
	// limit is the most tokens that may be generated.
	limit int
	// least is the number of tokens before which the answer may not end by itself.
	least int
	// endless answers only end at the limit.
	endless bool
	stop    []string
}

// answer makes up the answer to a prompt. Equal prompts, seeds and choices get equal answers.
func (l *lexicon) answer(seed uint64, prompt []uint32, choice, meanTokens int, w wish) answer {
	hash := xxhash.New()
	var buf [8]byte
	for _, x := range [...]uint64{seed, uint64(choice)} {
		binary.LittleEndian.PutUint64(buf[:], x)
		hash.Write(buf[:]) //nolint:errcheck // never fails
	}
	for _, id := range prompt {
		binary.LittleEndian.PutUint32(buf[:4], id)
		hash.Write(buf[:4]) //nolint:errcheck // never fails
	}
	rng := rand.New(rand.NewPCG(hash.Sum64(), seed))
	natural := max(meanTokens/2+rng.IntN(meanTokens+1), w.least, 1)
	var a answer
	if w.endless || natural >= w.limit {
		a = l.write(rng, w.limit)
		a.generated, a.finish = w.limit, "length"
	} else {
		a = l.write(rng, natural)
		a.generated, a.finish = natural+1, "stop"
	}
	a.cut(w.stop)
	return a
}

// cut ends the answer before the first of the stop strings in it.
func (a *answer) cut(stops []string) {
	at := -1
	for _, s := range stops {
		if i := strings.Index(a.text, s); s != "" && i >= 0 && (at < 0 || i < at) {
			at, a.stopString = i, s
		}
	}
	if at < 0 {
		return
	}
	// The token that completes the stop string is generated, but its text is not shown.
	seen := at + len(a.stopString)
	last, _ := slices.BinarySearch(a.ends, seen)
	a.ids, a.ends = a.ids[:last+1], a.ends[:last+1]
	a.text = a.text[:at]
	for i := range a.ends {
		a.ends[i] = min(a.ends[i], at)
	}
	a.generated, a.finish = last+1, "stop"
}

// fixed turns a text that is given, such as a tool call, into an answer that ends by itself after it.
func (l *lexicon) fixed(ctx context.Context, t Tokenizer, text string) (answer, error) {
	ids, err := encodeText(ctx, t, text)
	if err != nil {
		return answer{}, fmt.Errorf("encode a tool call: %w", err)
	}
	a := answer{ids: ids, text: text, generated: len(ids) + 1, finish: "stop"}
	// Which token ends where is not known, and does not matter: the pieces only have to add up.
	for i := range ids {
		a.ends = append(a.ends, len(text)*(i+1)/max(len(ids), 1))
	}
	return a, nil
}
