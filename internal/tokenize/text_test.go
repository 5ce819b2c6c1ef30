package tokenize

import (
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// textMaker writes text as people and programs do: words as frequent as words are, sentences, paragraphs, lists, numbers, code,
// other scripts, now and then a word never seen before. The same seed gives the same text.
type textMaker struct {
	rng   *rand.Rand
	words []string
	total float64
}

// vocabularyWords are the words of a tokenizer's vocabulary, in an order that depends on the words alone.
var vocabularyWords = sync.OnceValues(func() ([]string, error) {
	data, err := os.ReadFile(wordsPath)
	if err != nil {
		return nil, err
	}
	v, err := readVocabulary(data)
	if err != nil {
		return nil, err
	}
	var words []string
	err = v.entries(func(text string) bool {
		if len(text) > 3 && text[0] == ' ' && asciiLetter(text[1]) && strings.Trim(text[1:], "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") == "" {
			words = append(words, text[1:])
		}
		return true
	})
	sortByHash(words)
	return words, err
})

// wordsPath is where vocabularyWords come from.
var wordsPath string

func newTextMaker(tb testing.TB, seed uint64) *textMaker {
	tb.Helper()
	wordsPath = tokenizerPath(tb, "cohere-tokenizer")
	words, err := vocabularyWords()
	if err != nil || len(words) < 10_000 {
		tb.Fatalf("%d words in the vocabulary, %v", len(words), err)
	}
	return &textMaker{rng: rand.New(rand.NewPCG(seed, 99)), words: words, total: math.Log(float64(len(words)))}
}

func sortByHash(words []string) {
	key := func(s string) uint64 {
		h := uint64(14695981039346656037)
		for i := range len(s) {
			h = (h ^ uint64(s[i])) * 1099511628211
		}
		return h ^ h>>29
	}
	slices.SortFunc(words, func(a, b string) int {
		if ka, kb := key(a), key(b); ka != kb {
			if ka < kb {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
}

// word returns a word, the n-th with a chance in proportion to 1/n.
func (m *textMaker) word() string {
	if m.rng.IntN(200) == 0 {
		b := make([]byte, 4+m.rng.IntN(8))
		for i := range b {
			b[i] = byte('a' + m.rng.IntN(26))
		}
		return string(b)
	}
	return m.words[min(len(m.words)-1, int(math.Exp(m.rng.Float64()*m.total)))]
}

// text returns a text of n bytes of UTF-8.
func (m *textMaker) text(n int) string {
	var b strings.Builder
	b.Grow(n + 64)
	for b.Len() < n {
		switch m.rng.IntN(20) {
		case 0, 1:
			for range 2 + m.rng.IntN(6) {
				m.code(&b)
			}
			b.WriteString("\n")
		case 2:
			for i := range 2 + m.rng.IntN(5) {
				b.WriteString(strconv.Itoa(i+1) + ". ")
				m.sentence(&b)
				b.WriteString("\n")
			}
		case 3:
			for range 1 + m.rng.IntN(3) {
				b.WriteString(foreignSentences[m.rng.IntN(len(foreignSentences))])
			}
			b.WriteString("\n\n")
		default:
			for range 1 + m.rng.IntN(6) {
				m.sentence(&b)
				b.WriteString(" ")
			}
			b.WriteString("\n\n")
		}
	}
	s := b.String()[:n]
	for len(s) > 0 && s[len(s)-1] >= 0x80 { // may end within a character: end before it
		s = s[:len(s)-1]
	}
	return s + strings.Repeat("x", n-len(s))
}

func (m *textMaker) sentence(b *strings.Builder) {
	n := 4 + m.rng.IntN(20)
	for i := range n {
		w := m.word()
		if i == 0 {
			w = strings.ToUpper(w[:1]) + w[1:]
		} else {
			b.WriteByte(' ')
		}
		switch m.rng.IntN(40) {
		case 0:
			w = strconv.Itoa(m.rng.IntN(10000))
		case 1:
			w = "\"" + w + "\""
		case 2:
			w = "(" + w + ")"
		case 3:
			w += "'s"
		}
		b.WriteString(w)
		if i < n-1 && m.rng.IntN(10) == 0 {
			b.WriteByte(',')
		}
	}
	b.WriteByte("...!?:."[m.rng.IntN(7)])
}

func (m *textMaker) code(b *strings.Builder) {
	indent := strings.Repeat("    ", m.rng.IntN(4))
	name, arg := strings.ToLower(m.word()), strings.ToLower(m.word())
	switch m.rng.IntN(4) {
	case 0:
		b.WriteString(indent + name + " := " + arg + "." + strings.ToUpper(name[:1]) + name[1:] + "(ctx, " + strconv.Itoa(m.rng.IntN(100)) + ")\n")
	case 1:
		b.WriteString(indent + "if " + name + " != nil && len(" + arg + ") > 0 {\n")
	case 2:
		b.WriteString(indent + "return {\"" + name + "\": [" + arg + ", 1.5], \"ok\": true};\n")
	case 3:
		b.WriteString(indent + "// " + name + " " + arg + " " + m.word() + "\n" + indent + "}\n")
	}
}

var foreignSentences = [...]string{
	"你好，世界！今天天气很好，我们去公园吧，然后一起吃饭。", "服务器收到请求以后，先查看缓存，如果没有找到，就重新计算。",
	"Доброе утро, поезд отправляется в восемь часов. ", "Где находится библиотека, скажите, пожалуйста? ",
	"مرحبا بالعالم، كيف حالك اليوم؟ ", "こんにちは、世界。今日はいい天気ですね。", "안녕하세요, 오늘은 날씨가 좋습니다. ",
	"👍🏽 🎉 done ✅ ", "Où se trouve la bibliothèque, s'il vous plaît ? ", "Καλημέρα, πώς είσαι; ",
}
