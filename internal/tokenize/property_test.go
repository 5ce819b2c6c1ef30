package tokenize

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// fuzzedCuts is how many cuts the property is tried on for each tokenizer, in one run of the tests.
const fuzzedCuts = 15_000

// The property that the chunk cache stands on: whatever the text, cut at any of the places that were proved, the ids of the
// parts are those that HuggingFace's encoder gives for the whole.
func TestChunkedEqualsWhole(t *testing.T) {
	for _, tokenizer := range publicTokenizers {
		t.Run(tokenizer.name, func(t *testing.T) {
			p := loadPair(t, tokenizer.name)
			m := p.model
			rng := rand.New(rand.NewPCG(7, uint64(len(tokenizer.name))))
			special := specialOf(m.chunks.rules)
			maker := newTextMaker(t, 3)
			cuts, texts := 0, 0
			var want, got []uint32
			for cuts < fuzzedCuts {
				var text string
				switch texts % 4 {
				case 0:
					text = maker.text(200 + rng.IntN(4000))
				case 1:
					text = mixedScripts(rng, 20+rng.IntN(200))
				default:
					text = fuzzText(rng, special, 10+rng.IntN(400))
				}
				texts++
				var err error
				if want, err = p.reference.encode(want[:0], text, false); err != nil {
					t.Fatal(err)
				}
				some := 1 + rng.IntN(4) // every cut, every second, ...
				got, err = encodeCut(m.encoder, got[:0], text, m.chunks.rules, func(int) bool {
					if rng.IntN(some) > 0 {
						return false
					}
					cuts++
					return true
				})
				if err != nil {
					t.Fatalf("text %d: %v: %q", texts, err, text)
				}
				if !slices.Equal(got, want) {
					t.Fatalf("text %d cut at proved places has other ids than uncut: %q", texts, shortest(p, text))
				}
			}
			t.Logf("%d cuts in %d texts", cuts, texts)
		})
	}
}

// The same through the cache as it runs, on texts that grow, share parts and come back.
func TestCachedEqualsWhole(t *testing.T) {
	for _, tokenizer := range publicTokenizers {
		t.Run(tokenizer.name, func(t *testing.T) {
			p := loadPair(t, tokenizer.name)
			m := p.model
			rng := rand.New(rand.NewPCG(8, 8))
			maker := newTextMaker(t, 4)
			documents := []string{maker.text(20_000), mixedScripts(rng, 3000), fuzzText(rng, specialOf(m.chunks.rules), 3000)}
			var want []uint32
			for range 6 {
				text := fuzzText(rng, nil, rng.IntN(300)) + documents[rng.IntN(len(documents))]
				for range 3 { // a conversation's turns
					var err error
					if want, err = p.reference.encode(want[:0], text, false); err != nil {
						t.Fatal(err)
					}
					for range 2 { // new, then seen
						got, err := m.chunks.encode(context.Background(), nil, text, nil, nil)
						if err != nil {
							t.Fatal(err)
						}
						if !slices.Equal(got, want) {
							t.Fatalf("the cached encoding of %d bytes has other ids than HuggingFace's, from %d on", len(text), firstDifference(got, want))
						}
					}
					text += maker.text(rng.IntN(3000)) + "\n"
				}
			}
		})
	}
}

// FuzzChunkedEqualsWhole looks for a text whose ids depend on where it is cut. take chooses the cuts, bit by bit.
func FuzzChunkedEqualsWhole(f *testing.F) {
	for i, text := range corpusTexts {
		f.Add(text, uint64(1)<<(i%64)|0x5555)
	}
	f.Add("Hello, world.\n\nNext <|im_end|>\n<|im_start|>user\nline, and. So on", ^uint64(0))
	names := []string{"prefixgate-demo", "qwen3", "deepseek_v3", "bert-base-uncased"}
	for _, name := range names { // before the first input: each has ten seconds
		loadPair(f, name)
	}
	f.Fuzz(func(t *testing.T, text string, take uint64) {
		if !utf8.ValidString(text) {
			text = strings.ToValidUTF8(text, "\ufffd")
		}
		for _, name := range names {
			p := loadPair(t, name)
			want, err := p.reference.encode(nil, text, false)
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			got, err := encodeCut(p.model.encoder, nil, text, p.model.chunks.rules, func(int) bool {
				n++
				return take>>(n%64)&1 == 1
			})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: cut at proved places %q has ids %v, uncut %v", name, text, got, want)
			}
			cached, err := p.model.chunks.encode(t.Context(), nil, text, nil, nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !slices.Equal(cached, want) {
				t.Errorf("%s: %q has ids %v from the cache, %v uncut", name, text, cached, want)
			}
		}
	})
}

// shortest returns the shortest part of text between its lines that shows the fault, for the message.
func shortest(p *pair, text string) string {
	wrong := func(s string) bool {
		want, err1 := p.reference.encode(nil, s, false)
		got, err2 := encodeCut(p.model.encoder, nil, s, p.model.chunks.rules, func(int) bool { return true })
		return err1 != nil || err2 != nil || !slices.Equal(want, got)
	}
	for {
		shorter := ""
		for i := range text {
			for _, part := range [...]string{text[i:], text[:i]} {
				if len(part) < len(text) && wrong(part) && (shorter == "" || len(part) < len(shorter)) {
					shorter = part
				}
			}
			if shorter != "" && len(shorter) < len(text)/2 {
				break
			}
		}
		if shorter == "" {
			return text
		}
		text = shorter
	}
}

func specialOf(rules *cutRules) []string {
	var special []string
	for token := range rules.special.tokens {
		special = append(special, token)
	}
	slices.Sort(special)
	return special
}

// mixedScripts joins n words and sentences of many scripts with punctuation of theirs.
func mixedScripts(rng *rand.Rand, n int) string {
	pieces := [...]string{
		"Слово", "который ", "ещё, ", "день. ", "Ω", "λόγος ", "ἀρχή ", "سلام ", "كتابٌ ", "مدرسة، ", "؟ ", "שלום ", "מִלָּה ", "नमस्ते ", "क्षत्रिय ", "संस्कृत। ", "ภาษาไทย", " เรียน ",
		"漢字", "仮名かな", "カタカナー", "、", "。", "，", "！", "「", "」", "한국어 ", "한\u1100\u1161 ", "조선말, ", "中文，", "测试。", "汉语、", "🎉", "👨‍👩‍👧 ", "🏳️‍🌈", "🇯🇵🇰🇷", "e\u0301", "a\u0323\u0302 ", "ñ", "İ", "ı", "ß ", "ﬀ", "Ǆ", "ﷺ ",
		"\n", "\n\n", " ", "\u00a0", "\u3000", ", ", ". ", "word ", "Word", "a", "1", "٣", "४", "Ⅷ", "½",
	}
	var b strings.Builder
	for range n {
		b.WriteString(pieces[rng.IntN(len(pieces))])
	}
	return b.String()
}
